"""Exact softmax attention inside clusters, given as possibly overlapping lists of queries and of keys.

Plain torch on every device, in blocks of linear memory. The parts of a query in several clusters are merged by
log-sum-exp; the backward recomputes scores: exp(score − log N − lse) is the final weight of a pair in each cluster.

W clusters per row, M slots per cluster, n clusters per block, m queries of each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megasparse.ops.gathered_attention import PairBlock, backward_statistics
from megasparse.ops.operator import Function, wide_dtype, without_autocast
from megasparse.ops.random import PairDropout

_CPU_BLOCK_ELEMENTS = 1 << 18  # scores per block: 1 MB of fp32, to fit in cache
_GPU_BLOCK_ELEMENTS = 1 << 24

ClusterIndices = tuple[Tensor, Tensor]
"""Queries and keys of each cluster."""


@dataclass(frozen=True)
class ClusterAttentionSpec:
    """Settings of cluster attention. scale: factor of q·k. count_clusters: include a pair in N clusters once."""

    causal: bool
    scale: float
    count_clusters: bool


@without_autocast
def cluster_attention(
    q: Tensor, k: Tensor, v: Tensor, clusters: ClusterIndices, spec: ClusterAttentionSpec,
    key_mask: Tensor | None = None, segments: Tensor | None = None, dropout: PairDropout | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute out_i = Σ_w Σ_j exp(scale·q_i·k_j − log N_ij − lse_i) v_j over the clusters w that contain query i and
    their keys j.

    Args:
        q: (B, H, Lq, D).
        k, v: (B, H, Lk, D).
        clusters: Queries (B|1, H|1, W, Mq) and keys (B|1, H|1, W, Mk), token numbers, each at most once per list; −1 in
            empty slots.
        spec: N_ij is the number of clusters with query i and key j, or 1 without spec.count_clusters.
        key_mask: (B, Lk) bool, true for keys that may be visible; queries are not masked.
        segments: (B, L) with Lq = Lk; documents never attend to each other.
        dropout: Dropout of the probabilities; lse includes all pairs.

    Returns:
        out (B, H, Lq, D) and lse (B, H, Lq) as in `bucketed_attention`, 0 and −∞ for queries without a visible key.
    """
    k = k.to(q.dtype)  # torch.autocast leaves some inputs in bf16 and some in fp32
    v = v.to(q.dtype)
    out, lse = _ClusterAttention.apply(q, k, v, *clusters, spec, key_mask, segments, dropout)
    return out, lse


class _ClusterAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        dtype = wide_dtype(q)
        out = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device)
        *lists, ctx.spec, key_mask, segments, ctx.dropout = settings
        for block in _blocks(q, k, v, (lists[0], lists[1]), ctx.spec, key_mask, segments, ctx.dropout):
            score = block.score
            highest = score.amax(-1, keepdim=True).clamp_min_(torch.finfo(dtype).min)
            weight = score.sub_(highest).exp_()
            total = weight.sum(-1, keepdim=True)
            if block.factors is not None:
                weight *= block.factors
            part = torch.bmm(weight, block.v).mul_(torch.where(total > 0, 1.0 / total, 0.0))  # (n, m, D)
            _merge(out.flatten(0, 2), lse.flatten(), block.rows, part, (highest + total.log()).squeeze(-1))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *lists, key_mask, segments)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, query_index, key_index, key_mask, segments = ctx.saved_tensors
        grad_out, grad_lse = grads
        delta, lse = (x.flatten() for x in backward_statistics(grad_out, grad_lse, out, lse))  # (B·H·Lq,)
        grad_out = grad_out.flatten(0, 2)  # (B·H·Lq, D)
        sums = [torch.zeros_like(x, dtype=lse.dtype, memory_format=torch.contiguous_format) for x in (q, k, v)]
        dq, dk, dv = (x.flatten(0, 2) for x in sums)  # (B·H·L, D) each
        for block in _blocks(q, k, v, (query_index, key_index), ctx.spec, key_mask, segments, ctx.dropout):
            to_q = block.gradients(grad_out, delta, lse, ctx.spec.scale, dk, dv)  # (n, m, D)
            dq.index_add_(0, block.rows.flatten(), to_q.flatten(0, 1))
        return *(total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True)), *[None] * 6


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, lists: ClusterIndices, spec: ClusterAttentionSpec, key_mask: Tensor | None,
    segments: Tensor | None, dropout: PairDropout | None,
) -> Iterator[PairBlock]:  # fmt: skip
    """Yield some queries of one cluster, rows (n, m), and all its keys, or n clusters. Scores include −log N."""
    batch, heads, length, head_dim = q.shape
    key_length = k.shape[2]
    query_index, key_index = (index.expand(batch, heads, -1, -1) for index in lists)  # (B, H, W, Mq), (B, H, W, Mk)
    clusters, places, keys = *query_index.shape[2:], key_index.shape[3]
    dtype = wide_dtype(q)
    q_rows, k_rows, v_rows = (x.flatten(0, 2) for x in (q, k, v))  # (B·H·L, D) each
    members = None
    width = head_dim
    if spec.count_clusters and clusters > 1 and not q.is_meta:  # meta lists contain no values
        members = (_Memberships(query_index, length), _Memberships(key_index, key_length))
        width = head_dim + clusters
    elements = _CPU_BLOCK_ELEMENTS if q.device.type == "cpu" else _GPU_BLOCK_ELEMENTS
    tile = min(places, max(1, elements // max(keys, width)))
    step = max(1, elements // max(tile * keys, (tile + keys) * width // 2))
    for start in range(0, batch * heads * clusters, step):
        item = torch.arange(start, min(start + step, batch * heads * clusters), device=q.device)
        row = item // clusters
        cluster = item % clusters
        b = row // heads
        h = row % heads
        key = key_index[b, h, cluster].long()  # (n, Mk)
        token = key.clamp_min(0)
        key_visible = (key >= 0) if key_mask is None else (key >= 0) & key_mask[b[:, None], token]
        key_row = token + row[:, None] * key_length
        k_block, v_block = (x[key_row].to(dtype) for x in (k_rows, v_rows))  # (n, Mk, D)
        key_members = members[1].of(key_row, dtype) if members else None
        for query in query_index[b, h, cluster].long().split(tile, dim=1):  # (n, m)
            visible = key_visible[:, None, :] & (query >= 0)[:, :, None]  # (n, m, Mk)
            if spec.causal:
                visible &= key[:, None, :] <= query[:, :, None]
            query = query.clamp_min(0)
            if segments is not None:
                document = segments[b]
                visible &= document.gather(1, query)[:, :, None] == document.gather(1, token)[:, None, :]
            query_row = query + row[:, None] * length
            q_block = q_rows[query_row].to(dtype)  # (n, m, D)
            score = torch.bmm(q_block, k_block.transpose(1, 2)).mul_(spec.scale)  # (n, m, Mk)
            if members is not None and key_members is not None:
                count = torch.bmm(members[0].of(query_row, dtype), key_members.transpose(1, 2))  # (n, m, Mk)
                score -= count.clamp_min(1.0).log_()
            score.masked_fill_(~visible, -torch.inf)
            factors = None
            if dropout is not None:
                i = dropout.queries.flatten()[query_row].unsqueeze(2)
                j = dropout.keys(key_length)[token].unsqueeze(1)
                factors = dropout.factors(i, j, dtype)
            yield PairBlock(query_row, q_block, k_block, v_block, key_row.flatten(), score, factors)


class _Memberships:
    """Clusters of each token, as lists sorted by token, without a dense L·W table."""

    def __init__(self, index: Tensor, length: int):
        self.clusters = index.shape[2]
        token = index.flatten(0, 1).flatten(1).long()  # (B·H, W·M)
        real = token >= 0
        token = (token + torch.arange(len(token), device=token.device)[:, None] * length)[real]  # across all rows
        cluster = torch.arange(self.clusters, device=token.device).repeat_interleave(index.shape[3])
        self.size = torch.bincount(token, minlength=len(real) * length)
        self.first = self.size.cumsum(0) - self.size
        self.cluster = cluster.expand(len(real), -1)[real][token.argsort(stable=True)]

    def of(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return 1 if a token (…), numbered across all rows, is in a cluster, else 0: (…, W)."""
        flat = tokens.flatten()
        size = self.size[flat]
        entry = torch.arange(flat.numel(), device=flat.device).repeat_interleave(size)
        number = torch.arange(entry.numel(), device=flat.device) - (size.cumsum(0) - size)[entry]
        table = torch.zeros(flat.numel(), self.clusters, dtype=dtype, device=flat.device)
        table[entry, self.cluster[self.first[flat][entry] + number]] = 1.0
        return table.view(*tokens.shape, self.clusters)


def _merge(out: Tensor, lse: Tensor, rows: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a block's outputs (n, m, D) and log-sums (n, m) into out (rows, D) and lse (rows); rows may repeat."""
    if out.is_meta:  # the repeated rows depend on data
        return
    rows, slot = rows.flatten().unique(return_inverse=True)
    part = part.flatten(0, 1)  # (n·m, D)
    part_lse = part_lse.flatten()  # (n·m)
    old = lse[rows]
    highest = old.scatter_reduce(0, slot, part_lse, "amax").clamp_min_(torch.finfo(lse.dtype).min)
    total = (old - highest).exp().index_add_(0, slot, (part_lse - highest[slot]).exp_())
    merged = highest + total.log_()
    finite = merged.masked_fill(merged == -torch.inf, 0.0)
    sums = out[rows] * (old - finite).exp().unsqueeze(-1)
    out[rows] = sums.index_add_(0, slot, part * (part_lse - finite[slot]).exp_().unsqueeze(-1))
    lse[rows] = merged
