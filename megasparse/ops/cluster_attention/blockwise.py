"""Cluster attention in blocks: linear memory, forward and backward.

A block is some clusters, or some queries of one cluster, with all keys of theirs. A query of several clusters is merged
block by block by log-sum-exp. The backward recomputes scores: exp(score − log N − lse) is a pair's final weight,
whatever its cluster.

B batch, H heads, L length, D head dim, W clusters of B·H rows each, M places of a cluster, n clusters in a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megasparse.ops.autocast import Function, without_autocast
from megasparse.ops.blocks import at_most
from megasparse.ops.cluster_attention.specification import ClusterAttentionSpec
from megasparse.ops.random import PairDropout

_CPU_BLOCK_ELEMENTS = 1 << 18  # scores in a block: 1 MB of fp32, so that it stays in cache
_GPU_BLOCK_ELEMENTS = 1 << 24


@without_autocast
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
    """Computes `operator.cluster_attention` in blocks."""
    out, lse = _ClusterAttention.apply(q, k, v, query_index, key_index, spec, key_mask, segments, dropout)
    return out, lse


class _ClusterAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, query_index: Tensor, key_index: Tensor, spec: ClusterAttentionSpec,
        key_mask: Tensor | None, segments: Tensor | None, dropout: PairDropout | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device)
        for block in _blocks(q, k, v, query_index, key_index, spec, key_mask, segments, dropout):
            score = block.scores()
            highest = score.amax(-1, keepdim=True).clamp_min_(torch.finfo(dtype).min)
            weight = score.sub_(highest).exp_()
            total = weight.sum(-1, keepdim=True)
            if block.factors is not None:
                weight *= block.factors
            part = torch.bmm(weight, block.v).mul_(torch.where(total > 0, 1.0 / total, 0.0))
            _merge(out.flatten(0, 2), lse.flatten(), block.query, part, (highest + total.log()).squeeze(-1))
        out = out.to(q.dtype)
        ctx.spec, ctx.dropout = spec, dropout
        ctx.save_for_backward(q, k, v, query_index, key_index, key_mask, segments, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, query_index, key_index, key_mask, segments, out, lse = ctx.saved_tensors
        blind = lse == -torch.inf
        grad_out, grad_lse = grads[0].to(lse.dtype), torch.where(blind, 0.0, grads[1])
        delta = ((grad_out * out).sum(-1) - grad_lse).flatten()
        flat_lse = lse.masked_fill(blind, torch.inf).flatten()  # exp(score − ∞) = 0: no gradient from what sees nothing
        grad_out = grad_out.flatten(0, 2)
        dq, dk, dv = (
            torch.zeros_like(x, dtype=lse.dtype, memory_format=torch.contiguous_format).flatten(0, 2) for x in (q, k, v)
        )
        for block in _blocks(q, k, v, query_index, key_index, ctx.spec, key_mask, segments, ctx.dropout):
            weight = block.scores().sub_(flat_lse[block.query].unsqueeze(-1)).exp_()
            grad = grad_out[block.query]
            score_grad, kept = torch.bmm(grad, block.v.transpose(1, 2)), weight
            if block.factors is not None:
                kept = weight * block.factors
                score_grad *= block.factors
            _add(dv, block.key, torch.bmm(kept.transpose(1, 2), grad))
            score_grad.sub_(delta[block.query].unsqueeze(-1)).mul_(weight).mul_(ctx.spec.scale)
            _add(dq, block.query, torch.bmm(score_grad, block.k))
            _add(dk, block.key, torch.bmm(score_grad.transpose(1, 2), block.q))
        found = (dx.view(x.shape).to(x.dtype) for dx, x in ((dq, q), (dk, k), (dv, v)))
        return *found, None, None, None, None, None, None


@dataclass
class _Block:
    """Queries and keys of some clusters. q: (n, m, D), m queries of each of n clusters. k, v: (n, Mk, D). query, key:
    (n, m) and (n, Mk), rows of the flattened heads (empty places name a row that nothing of theirs reaches). seen: (n,
    m, Mk). count: N, or None. factors: of the probabilities, by dropout, (n, m, Mk), or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    query: Tensor
    key: Tensor
    seen: Tensor
    count: Tensor | None
    factors: Tensor | None
    scale: float

    def scores(self) -> Tensor:
        """Return scale·q·k − log N where visible, −∞ elsewhere: (n, m, Mk)."""
        score = torch.bmm(self.q, self.k.transpose(1, 2)).mul_(self.scale)
        if self.count is not None:
            score -= self.count.clamp_min(1.0).log_()
        return score.masked_fill_(~self.seen, -torch.inf)


class _Memberships:
    """The clusters of each token: the lists, sorted by token. Nothing of L·W numbers is kept."""

    def __init__(self, index: Tensor, length: int):
        rows, self.clusters = index.shape[0] * index.shape[1], index.shape[2]
        key = index.to(torch.int64).reshape(rows, -1)
        real = key >= 0
        key = (key + torch.arange(rows, device=key.device)[:, None] * length)[real]  # row of the token, flattened
        cluster = torch.arange(self.clusters, device=key.device).repeat_interleave(index.shape[3])
        self.size = torch.bincount(key, minlength=rows * length)
        self.first = self.size.cumsum(0) - self.size
        self.cluster = cluster.expand(rows, -1)[real][key.argsort(stable=True)]

    def of(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """1 where a token (…), flattened with its row, stands in a cluster, else 0: (…, W)."""
        flat = tokens.flatten()
        size = self.size[flat]
        which = torch.arange(flat.numel(), device=flat.device).repeat_interleave(size)
        number = torch.arange(which.numel(), device=flat.device) - (size.cumsum(0) - size)[which]
        table = torch.zeros(flat.numel(), self.clusters, dtype=dtype, device=flat.device)
        table[which, self.cluster[self.first[flat][which] + number]] = 1.0
        return table.view(*tokens.shape, self.clusters)


def _blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    spec: ClusterAttentionSpec,
    key_mask: Tensor | None,
    segments: Tensor | None,
    dropout: PairDropout | None,
) -> Iterator[_Block]:
    batch, heads, length, head_dim = q.shape
    clusters, places, keys = *query_index.shape[2:], key_index.shape[3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    key_length = k.shape[2]
    q_rows, k_rows, v_rows = (x.flatten(0, 2) for x in (q, k, v))
    lists = ((query_index, length), (key_index, key_length))
    member = [_Memberships(index, size) for index, size in lists] if spec.count_clusters and clusters > 1 else None
    width = head_dim if member is None else head_dim + clusters
    elements = at_most(_CPU_BLOCK_ELEMENTS if q.device.type == "cpu" else _GPU_BLOCK_ELEMENTS)
    tile = min(places, max(1, elements // max(keys, width)))
    step = max(1, elements // max(tile * keys, (tile + keys) * width // 2))
    for start in range(0, batch * heads * clusters, step):
        item = torch.arange(start, min(start + step, batch * heads * clusters), device=q.device)
        row, cluster = item // clusters, item % clusters
        b, h = row // heads, row % heads
        key, key_row = _take(key_index, b, h, cluster)
        token = key.clamp_min(0)
        visible = (key >= 0) if key_mask is None else (key >= 0) & key_mask[b[:, None], token]
        key_flat = token + row[:, None] * key_length
        k_block, v_block = (x[key_flat].to(dtype) for x in (k_rows, v_rows))
        key_member = member[1].of(token + key_row[:, None] * key_length, dtype) if member else None
        queries, query_row = _take(query_index, b, h, cluster)
        for query in queries.split(tile, dim=1):
            seen = visible[:, None, :] & (query >= 0)[:, :, None]  # (n, m, Mk)
            if spec.causal:
                seen &= key[:, None, :] <= query[:, :, None]
            query = query.clamp_min(0)
            if segments is not None:
                document = segments[b]
                seen &= document.gather(1, query)[:, :, None] == document.gather(1, token)[:, None, :]
            count = None
            if member is not None and key_member is not None:
                count = torch.bmm(member[0].of(query + query_row[:, None] * length, dtype), key_member.transpose(1, 2))
            flat = query + row[:, None] * length
            q_block = q_rows[flat].to(dtype)
            factors = None
            if dropout is not None:
                i, j = dropout.queries.flatten()[flat].unsqueeze(2), dropout.keys(key_length)[token].unsqueeze(1)
                factors = dropout.factors(i, j, dtype)
            yield _Block(q_block, k_block, v_block, flat, key_flat, seen, count, factors, spec.scale)


def _take(index: Tensor, b: Tensor, h: Tensor, cluster: Tensor) -> tuple[Tensor, Tensor]:
    """The lists of clusters of rows (b, h), (n, M) int64, and the lists' own row; a size of 1 holds for all."""
    rows, heads = index.shape[:2]
    b, h = b % rows if rows == 1 else b, h % heads if heads == 1 else h
    return index[b, h, cluster].to(torch.int64), b * heads + h


def _merge(out: Tensor, lse: Tensor, rows: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Takes a block's outputs (n, m, D) and log-sums (n, m) into out (rows, D) and lse (rows); a row may come twice."""
    rows, place = rows.flatten().unique(return_inverse=True)
    part, part_lse, old = part.flatten(0, 1), part_lse.flatten(), lse[rows]
    highest = old.scatter_reduce(0, place, part_lse, "amax").clamp_min_(torch.finfo(lse.dtype).min)
    total = (old - highest).exp().index_add_(0, place, (part_lse - highest[place]).exp_())
    merged = highest + total.log_()
    finite = merged.masked_fill(merged == -torch.inf, 0.0)
    sums = out[rows] * (old - finite).exp().unsqueeze(-1)
    out[rows] = sums.index_add_(0, place, part * (part_lse - finite[place]).exp_().unsqueeze(-1))
    lse[rows] = merged


def _add(out: Tensor, rows: Tensor, x: Tensor) -> None:
    out.index_add_(0, rows.flatten(), x.flatten(0, 1))
