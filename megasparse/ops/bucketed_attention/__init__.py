"""Exact softmax attention inside windows of tokens sorted by bucket: the one operator of all hashed attention.

Local attention is the case of one bucket and one round.
"""

from megasparse.ops.bucketed_attention.operator import bucketed_attention
from megasparse.ops.bucketed_attention.ranges import windows_by_key_rank
from megasparse.ops.bucketed_attention.specification import BucketedAttentionSpec, Window

__all__ = ["BucketedAttentionSpec", "Window", "bucketed_attention", "windows_by_key_rank"]
