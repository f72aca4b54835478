"""Attention whose weights are products of positive random features (Performer), by running sums: linear in length."""

from megasparse.ops.linear_attention.blockwise import State, causal_linear_attention, linear_attention

__all__ = ["State", "causal_linear_attention", "linear_attention"]
