"""Vectors scaled to length 1, among them the keys of shared queries and keys."""

from megasparse.ops.unit_keys.operator import unit_keys, unit_vectors

__all__ = ["unit_keys", "unit_vectors"]
