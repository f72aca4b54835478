"""Attention utility per bucket, what LHA's hash functions learn: exactly, or by positive random features."""

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

__all__ = ["Features", "Tile", "bucket_sums", "exact_keys", "exact_queries", "feature_keys", "feature_queries", "tiles"]
