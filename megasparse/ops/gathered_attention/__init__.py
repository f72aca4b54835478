"""Exact softmax attention of every query to the few keys that an index names for it (Smart Bird)."""

from megasparse.ops.gathered_attention.operator import gathered_attention

__all__ = ["gathered_attention"]
