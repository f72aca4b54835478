"""Attention by Bernoulli sampling (YOSO): values are added up in hash tables and read by the queries' codes."""

from megasparse.ops.hash_table_attention.expected import expected_attention
from megasparse.ops.hash_table_attention.operator import hash_table_attention
from megasparse.ops.hash_table_attention.specification import HashTableAttentionSpec

__all__ = ["HashTableAttentionSpec", "expected_attention", "hash_table_attention"]
