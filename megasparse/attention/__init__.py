"""Attention mechanisms. Each module defines a configuration section and a class, and registers both.

The import order is the registration order, which fixes the order of the heads in a layer with several mechanisms.
Never change it.
"""

from megasparse.attention import (  # isort: skip
    full, local, lsh, lha, yoso, smart_bird, smyrf, routing, fixed_patterns, performer, ngram, ranked,
)  # fmt: skip

__all__ = [
    "fixed_patterns", "full", "lha", "local", "lsh", "ngram", "performer", "ranked", "routing", "smart_bird", "smyrf",
    "yoso",
]  # fmt: skip
