"""Attention in chunks with relative positions (Transformer-XL); `bucketed_attention` has it without them."""

from megasparse.ops.local_attention.blockwise import distances
from megasparse.ops.local_attention.operator import relative_local_attention
from megasparse.ops.local_attention.specification import LocalAttentionSpec

__all__ = ["LocalAttentionSpec", "distances", "relative_local_attention"]
