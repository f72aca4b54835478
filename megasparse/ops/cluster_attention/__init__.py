"""Exact softmax attention inside clusters that are given as lists of queries and lists of keys, which may overlap."""

from megasparse.ops.cluster_attention.operator import cluster_attention
from megasparse.ops.cluster_attention.specification import ClusterAttentionSpec

__all__ = ["ClusterAttentionSpec", "cluster_attention"]
