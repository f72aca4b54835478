"""megasparse: pretraining of transformers on very long sequences, with attention found by hashing."""

__version__ = "0.1.0"
