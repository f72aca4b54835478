"""How well hashed attention stands for full attention, measured on trained models."""
