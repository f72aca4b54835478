"""Clustered attention (Vyas et al. 2020), FCA and i-FCA. B batch, H heads, n tokens of a document, D head dim, C
clusters.
"""

import torch
from torch import Tensor

from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, AttentionOutput
from megasparse.attention.documents import attend_each, documents, padding_apart
from megasparse.attention.flops import Flops, product
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Count, Positive
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.random import normal_by_head


class ClusteredAttentionConfig(MechanismSection):
    clusters: Positive = 100
    """C, clusters of queries."""
    keys: Count = 32
    """Keys of each cluster whose weights are computed again for each query (i-FCA); 0 is FCA."""
    bits: Positive = 63
    """Signs of random projections that queries are clustered by."""
    iterations: Positive = 10
    """Steps of K-means on these signs, by Hamming distance."""

    no_probabilities = True
    bidirectional_only = "it clusters the queries of the whole sequence"


@mechanism("clustered", ClusteredAttentionConfig)
class ClusteredAttention(Attention):
    """FCA, softmax(c·kᵀ/√D)v, c the mean query of a query's cluster. i-FCA divides c's weight on its K best keys among
    them by softmax(q·kᵀ/√D) (Vyas et al. 2020, Eq. 3 to 6 and 9 to 11).
    """

    @torch.no_grad()
    def assign(self, q: Tensor, k: Tensor, lines: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cluster of each query of a document, (B, H, n), and each cluster's K best keys, (B, H, C, K)."""
        q = at_least_fp32(q)
        signs = (q @ lines.to(q.dtype).transpose(-1, -2)).sign()  # (B, H, n, bits)
        count = min(self.config.clusters, q.shape[2])
        first = torch.arange(count, device=q.device) * q.shape[2] // count
        centres = signs[:, :, first]
        for _ in range(self.config.iterations):
            cluster = (signs @ centres.transpose(-1, -2)).argmax(-1)
            centres = (_members(cluster, count, signs) @ signs).sign()
        cluster = (signs @ centres.transpose(-1, -2)).argmax(-1)
        scores = _mean_queries(q, cluster, count) @ at_least_fp32(k).transpose(-1, -2)
        return cluster, scores.topk(min(self.config.keys, k.shape[2]), dim=-1).indices

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        heads = context.heads(inputs.q.shape[1])
        key = context.key("clustered signs")
        lines = normal_by_head(key, heads, self.config.bits, inputs.q.shape[3], inputs.q.device)
        inputs = padding_apart(inputs)  # clusters depend on the number of queries

        def assigned() -> list[tuple[Tensor, Tensor]]:
            return [
                self.assign(document.take(inputs.q), document.take(inputs.k), lines)
                for document in documents(inputs.key_mask, inputs.segments)
            ]

        clusters = iter(context.recompute.keep(assigned))

        def attend(inputs: AttentionInputs) -> Tensor:
            q, k, v = (at_least_fp32(x) for x in inputs[:3])
            scale = q.shape[3] ** -0.5
            cluster, best = next(clusters)
            own = cluster.unsqueeze(-1)  # (B, H, n, 1)
            centres = _mean_queries(q, cluster, best.shape[2])
            weights = (centres @ k.transpose(-1, -2) * scale).softmax(-1)  # (B, H, C, n)
            mass = weights.gather(-1, best).sum(-1, keepdim=True)  # (B, H, C, 1)
            out = (weights.scatter(-1, best, 0.0) @ v).gather(2, own.expand_as(q))

            def of_cluster(x: Tensor) -> Tensor:
                chosen = best.gather(2, own.expand(*own.shape[:3], best.shape[3]))  # (B, H, n, K)
                rows = chosen.flatten(2).unsqueeze(-1).expand(-1, -1, -1, x.shape[3])
                return x.gather(2, rows).unflatten(2, chosen.shape[2:])  # (B, H, n, K, D)

            if self.config.keys:
                scores = of_cluster(k) @ q.unsqueeze(-1) * scale  # (B, H, n, K, 1)
                again = scores.softmax(3) * mass.gather(2, own).unsqueeze(-1)
                out = out + (again * of_cluster(v)).sum(3)
            return out.to(inputs.q.dtype)

        return AttentionOutput(attend_each(inputs, attend))

    def flops(self, length: int) -> Flops:
        """Scores and values of C centres, their mean, and of K keys per query; signs and their clusters."""
        config = self.config
        dim = self.spec.head_dim
        clusters = min(config.clusters, length)
        pairs = dim * (6.0 * clusters + 4.0 * config.keys)
        signs = 2.0 * config.bits * (dim + (2 * config.iterations + 1) * clusters)
        return (product(pairs) + Flops(signs)) * self.spec.heads


def _members(cluster: Tensor, count: int, like: Tensor) -> Tensor:
    """Return (B, H, C, n), 1 for the queries of a cluster. cluster: (B, H, n)."""
    return (cluster.unsqueeze(2) == torch.arange(count, device=cluster.device)[:, None]).to(like.dtype)


def _mean_queries(q: Tensor, cluster: Tensor, count: int) -> Tensor:
    """Return the mean query of each cluster, (B, H, C, D); 0 for an empty one."""
    members = _members(cluster, count, q)
    return members @ q / members.sum(-1, keepdim=True).clamp_min(1)
