"""Exact softmax attention inside windows of tokens sorted by bucket: the operator of all hashed attention.

spec.py         Window and BucketedAttentionSpec, and tiles by rank
blocks.py       CPU implementation in blocks of tiles, forward and backward; layouts.py defines the tiles
gpu.py          GPU implementation: host code of kernels.py
ranges.py       keys of a query by rank in its bucket, if queries and keys have separate codes
"""

from megasparse.ops.bucketed_attention import blocks
from megasparse.ops.bucketed_attention.spec import BucketedAttentionSpec, Codes, Window
from megasparse.ops.operator import Operator

__all__ = ["BucketedAttentionSpec", "Codes", "Window", "bucketed_attention"]

bucketed_attention = Operator(
    blocks.bucketed_attention,
    kernels="megasparse.ops.bucketed_attention.gpu:bucketed_attention",
    cast=2,
)
