"""Attention in chunks of positions with relative positions (Transformer-XL). Without them it is a case of
`bucketed_attention`.
"""

from megasparse.ops.local_attention.blockwise import distances
from megasparse.ops.local_attention.operator import relative_local_attention
from megasparse.ops.local_attention.specification import LocalAttentionSpec

__all__ = ["LocalAttentionSpec", "distances", "relative_local_attention"]
