"""What LHA's hash functions learn from their scores: ranks of tokens in buckets, and the divergence from a target."""

from megasparse.ops.hash_learning.operator import divergence, ranks, unit_sum

__all__ = ["divergence", "ranks", "unit_sum"]
