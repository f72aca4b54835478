"""The definition of cluster attention: dense, O(Lq·Lk), for tests.

B batch, H heads, L length, D head dim, W clusters, M places of a cluster.
"""

import torch
from torch import Tensor

from megasparse.ops.cluster_attention.specification import ClusterAttentionSpec
from megasparse.ops.random import PairDropout


def members(index: Tensor, length: int) -> Tensor:
    """Whether a token (row) stands in a cluster's list (column): (B, H, length, W). index: (B, H, W, M), −1 empty."""
    return (index[..., None, :, :] == torch.arange(length, device=index.device)[:, None, None]).any(-1)


def cluster_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    spec: ClusterAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    dropout: PairDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute out_i = Σ_j N_ij exp(scale·q_i·k_j − lse_i) v_j with N_ij the number of clusters that hold query i and
    key j, at most 1 with spec.count_clusters. lse_i: the log of the sum without v_j. A query without any key gets 0 and
    −∞.
    """
    query, key = members(query_index, q.shape[2]), members(key_index, k.shape[2])
    count = torch.einsum("bhiw,bhjw->bhij", query.to(q.dtype), key.to(q.dtype)).expand(*q.shape[:3], -1)
    if spec.count_clusters:
        count = count.clamp_max(1.0)
    if spec.causal:
        count = count.tril()
    if key_mask is not None:
        count = count * key_mask[:, None, None, :]
    if segments is not None:
        count = count * (segments[:, None, :, None] == segments[:, None, None, :])
    score = spec.scale * q @ k.transpose(-1, -2) + count.log()
    blind = (count == 0).all(-1)  # kept out of the softmax, whose gradient would be NaN
    score = score.masked_fill(blind[..., None], 0.0)
    probability = torch.softmax(score, dim=-1)
    if dropout is not None:
        probability = probability * dropout.dense(k.shape[2], q.dtype)
    out = (probability @ v).masked_fill(blind[..., None], 0.0)
    return out, torch.logsumexp(score, dim=-1).masked_fill(blind, -torch.inf)
