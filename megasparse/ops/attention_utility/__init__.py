"""Attention utility per bucket, what LHA's hash functions learn: exactly, by positive random features, or sampled."""

from megasparse.ops.attention_utility.blockwise import (
    Features,
    Tile,
    bucket_sums,
    exact_keys,
    exact_queries,
    feature_keys,
    feature_queries,
    tiles,
)
from megasparse.ops.attention_utility.sampled import (
    Draws,
    Queries,
    at_tokens,
    draw_keys,
    sampled_keys,
    sampled_normalizer,
    sampled_queries,
)

__all__ = [
    "Draws",
    "Features",
    "Queries",
    "Tile",
    "at_tokens",
    "bucket_sums",
    "draw_keys",
    "exact_keys",
    "exact_queries",
    "feature_keys",
    "feature_queries",
    "sampled_keys",
    "sampled_normalizer",
    "sampled_queries",
    "tiles",
]
