"""Exact softmax attention inside windows of tokens sorted by bucket: the one operator of all hashed attention.

Local attention is the case of one bucket and one round.

    definition.py   Window, BucketedAttentionSpec, and the definition, dense
    blocks.py       what a CPU runs: blocks of tiles, forward and backward; layouts.py has the tiles
    gpu.py          what a GPU runs: host code of kernels.py
    ranges.py       the keys of a query by their rank in its bucket, where queries and keys have codes of their own
"""

from megasparse.ops.bucketed_attention import blocks
from megasparse.ops.bucketed_attention.definition import BucketedAttentionSpec, Window, reference_attention
from megasparse.ops.bucketed_attention.ranges import windows_by_key_rank
from megasparse.ops.operator import Operator

__all__ = ["BucketedAttentionSpec", "Window", "bucketed_attention", "windows_by_key_rank"]

bucketed_attention = Operator(
    blocks.bucketed_attention,
    kernels="megasparse.ops.bucketed_attention.gpu:bucketed_attention",
    reference=reference_attention,
    cast=2,
)
