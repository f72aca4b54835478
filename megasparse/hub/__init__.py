"""HuggingFace: export, import, and a pretrained model's attention replaced."""
