"""Keys of shared queries and keys: the queries, scaled to length 1."""

from megasparse.ops.unit_keys.operator import unit_keys

__all__ = ["unit_keys"]
