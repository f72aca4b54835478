"""How well hashed attention approximates full attention, measured on trained models."""
