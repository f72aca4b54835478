"""SMYRF attention (Daras et al. 2020): equal-sized clusters of queries and keys, sorted along random projections."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, AttentionOutput
from megasparse.attention.documents import Document, clusters_by_document
from megasparse.attention.flops import Flops
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Positive
from megasparse.ops.cluster_attention import ClusterAttentionSpec, ClusterIndices, cluster_attention
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.random import normal_by_head


class SMYRFAttentionConfig(MechanismSection):
    rounds: Positive = 2
    """Hash rounds, each with separate clusters."""
    chunk: Positive = 64
    """Queries, and keys, per cluster."""

    bidirectional_only = "its balanced clusters depend on all tokens"

    def hash_rounds(self, training: bool) -> int:
        return self.rounds


@mechanism("smyrf", SMYRFAttentionConfig)
class SMYRFAttention(Attention):
    """SMYRF, softmax(qkᵀ/√D)v inside the clusters of each round, ⌈n/chunk⌉ per document; rounds are merged by
    log-sum-exp, and a pair in the same cluster in several rounds is included in each of them, as in the paper.
    """

    shares_pairs = True

    @torch.no_grad()
    def assign(self, inputs: AttentionInputs, context: AttentionContext) -> ClusterIndices:
        heads = context.heads(inputs.q.shape[1])
        width = inputs.q.shape[3] + 2
        key = context.key("smyrf projection")
        lines = normal_by_head(key, heads, self.rounds(context.rng), width, inputs.q.device)  # (H, R, D + 2)

        def clusters(document: Document) -> ClusterIndices:
            q, k = asymmetric(document.take(inputs.q), document.take(inputs.k))
            along = lines.to(q.dtype)
            queries, keys = (equal_clusters(along @ x.transpose(-1, -2), self.config.chunk) for x in (q, k))
            return queries, keys

        return clusters_by_document(inputs, clusters)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        queries, keys = context.recompute.keep(lambda: self.assign(inputs, context))
        spec = ClusterAttentionSpec(causal=False, scale=inputs.q.shape[-1] ** -0.5, count_clusters=False)
        shard = context.part.pair_shard
        if shard is not None:
            queries, keys = (x[:, :, shard[0] :: shard[1]] for x in (queries, keys))
        out, lse = cluster_attention(inputs.q, inputs.k, inputs.v, (queries, keys), spec, dropout=inputs.dropout)
        return AttentionOutput(out, lse=None if shard is None else lse)

    def flops(self, length: int) -> Flops:
        """Per round, one cluster and the projection of q and k, widened by two numbers, to one dimension."""
        codes = Flops(self.spec.heads * 2 * 2.0 * (self.spec.head_dim + 2))
        return (self.spec.workload(length).pairs(self.config.chunk) + codes) * self.config.rounds


def asymmetric(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return F(q) = [q; 0; √(M_Q² + M_K² − |q|²)] and G(k) = [k; √(M_Q² + M_K² − |k|²); 0] (LHA Eq. 3), M_Q and M_K the
    maximum norms over tokens: |F(q) − G(k)|² = 2(M_Q² + M_K²) − 2q·k, small for high scores.

    q, k: (..., n, D). Returns (..., n, D + 2) each, in fp32 or wider.
    """
    q, k = (at_least_fp32(x) for x in (q, k))
    squares = [x.square().sum(-1, keepdim=True) for x in (q, k)]
    radius = sum(square.amax(-2, keepdim=True) for square in squares)
    missing_q, missing_k = ((radius - square).clamp_min(0.0).sqrt() for square in squares)
    return torch.cat([F.pad(q, (0, 1)), missing_q], -1), F.pad(torch.cat([k, missing_k], -1), (0, 1))


def equal_clusters(values: Tensor, size: int) -> Tensor:
    """Sort tokens by values (B, H, R, n) and split them into clusters of `size`: (B, H, R·⌈n/size⌉, min(size, n))."""
    order = values.argsort(dim=-1, stable=True)
    size = min(size, order.shape[-1])
    return F.pad(order, (0, -order.shape[-1] % size), value=-1).unflatten(-1, (-1, size)).flatten(2, 3)
