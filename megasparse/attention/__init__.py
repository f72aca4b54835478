"""Attention mechanisms: each a file with its settings, its class and one line that registers both.

Heads of one layer that several mechanisms share stand in the order of this list, which therefore never changes.
"""

from megasparse.attention import (  # isort: skip
    full, local, lsh, lha, yoso, smart_bird, smyrf, routing, random, sparse_transformer, longformer, bigbird, performer,
    linformer, ngram,
)  # fmt: skip

__all__ = [
    "bigbird", "full", "lha", "linformer", "local", "longformer", "lsh", "ngram", "performer", "random", "routing",
    "smart_bird", "smyrf", "sparse_transformer", "yoso",
]  # fmt: skip
