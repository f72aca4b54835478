"""Attention mechanisms: each with its settings, its class and one line that registers both.

Heads of one layer that several mechanisms share stand in the order of registration, and so of these imports, which
therefore never changes.
"""

from megasparse.attention import (  # isort: skip
    full, local, lsh, lha, yoso, smart_bird, smyrf, routing, fixed_patterns, performer, ngram,
)  # fmt: skip

__all__ = [
    "fixed_patterns", "full", "lha", "local", "lsh", "ngram", "performer", "routing", "smart_bird", "smyrf", "yoso",
]  # fmt: skip
