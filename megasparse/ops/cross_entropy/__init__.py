"""Cross-entropy of logits, and whether the target is the likeliest id."""

from megasparse.ops.cross_entropy.operator import token_scores

__all__ = ["token_scores"]
