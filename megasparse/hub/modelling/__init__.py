"""A megasparse model as HuggingFace's classes see it; exported folders hold these files (see hub/bundle.py)."""
