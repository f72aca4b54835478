"""Cross-entropy of logits, with what a head tells of every token."""

from megasparse.ops.cross_entropy.operator import token_scores

__all__ = ["token_scores"]
