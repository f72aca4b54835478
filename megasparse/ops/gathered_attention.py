"""Exact softmax attention of every query to a few keys given by an index (Smart Bird).

The blockwise form needs linear memory, forward and backward, and is deterministic on a CPU: the queries of all heads
are flattened, and each block of them gathers its keys and values. The backward gathers them again: exp(score − lse) is
the weight of a pair.

B batch, H heads, Lq queries, Lk keys, D head dim, K index slots, n queries per block.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasparse.ops.operator import Function, Operator
from megasparse.ops.random import PairDropout

_GATHERED_ELEMENTS = 1 << 18  # numbers in a block's gathered keys: 1 MB of fp32, to fit in cache


def _gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, scale: float, dropout: PairDropout | None = None
) -> tuple[Tensor, Tensor]:
    """Compute out_i = Σ_j exp(scale·q_i·k_j − lse_i) v_j over the keys j in row i of the index.

    Args:
        q: (B, H, Lq, D).
        k, v: (B, H, Lk, D).
        index: (B|1, H|1, Lq, K) int32 or int64 key numbers, −1 in empty slots; repeated keys are included repeatedly.
        scale: Factor of q·k.
        dropout: Dropout of the probabilities; lse includes all pairs.

    Returns:
        out (B, H, Lq, D) in q's dtype and lse (B, H, Lq), the log of the sum, in fp32 or wider; 0 and −∞ for queries
        whose slots are all empty. Scores, softmax statistics and gradients are computed in fp32 or wider.
    """
    out, lse = _GatheredAttention.apply(q, k, v, index, scale, dropout)
    return out, lse


def reference(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, scale: float, dropout: PairDropout | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `gathered_attention` densely; n_ij is the number of occurrences of key j in row i of the index."""
    keys = torch.arange(k.shape[2], device=k.device)
    count = (index[..., None] == keys).sum(3).to(q.dtype)  # (B|1, H|1, Lq, Lk)
    logits = scale * (q @ k.transpose(-1, -2)) + count.log()
    blind = (logits == -torch.inf).all(-1)  # avoid NaN gradients of a softmax over −∞
    logits = logits.masked_fill(blind[..., None], 0.0)
    probability = torch.softmax(logits, dim=-1)
    if dropout is not None:
        probability = probability * dropout.dense(k.shape[2], q.dtype)
    out = probability @ v
    return out.masked_fill(blind[..., None], 0.0), torch.logsumexp(logits, dim=-1).masked_fill(blind, -torch.inf)


gathered_attention = Operator(
    _gathered_attention,
    reference=reference,
    kernels="megasparse.ops.gathered_attention_kernels:gathered_attention",
    cast=2,
)


class _GatheredAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float, dropout: PairDropout | None
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
        outs, flat_lse = out.flatten(0, 2), lse.flatten()
        for block in _blocks(q, k, v, index, scale, dropout, dtype):
            score = block.score
            highest = score.amax(-1, keepdim=True).clamp_min_(torch.finfo(dtype).min)
            weight = score.sub_(highest).exp_()
            total = weight.sum(-1, keepdim=True)
            weight *= torch.where(total > 0, 1.0 / total, 0.0)
            if block.factors is not None:
                weight *= block.factors
            outs[block.rows] = torch.bmm(weight[:, None], block.v).squeeze(1).to(q.dtype)
            flat_lse[block.rows] = (highest + total.log()).squeeze(-1)
        ctx.scale, ctx.dropout = scale, dropout
        ctx.save_for_backward(q, k, v, index, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse = grads
        q, k, v, index, out, lse = ctx.saved_tensors
        dtype = lse.dtype
        blind = lse == -torch.inf
        delta = ((grad_out.to(dtype) * out).sum(-1) - grad_lse.masked_fill(blind, 0.0)).flatten()
        flat_lse = lse.masked_fill(blind, torch.inf).flatten()  # exp(score − ∞) = 0: no gradient from these queries
        grad_out = grad_out.flatten(0, 2)
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
        to_q, to_k, to_v = (x.flatten(0, 2) for x in (dq, dk, dv))
        for block in _blocks(q, k, v, index, ctx.scale, ctx.dropout, dtype):
            weight = block.score.sub_(flat_lse[block.rows, None]).exp_()
            grad = grad_out[block.rows, None].to(dtype)  # (n, 1, D)
            score_grad, dropped = torch.bmm(grad, block.v.transpose(1, 2)).squeeze(1), weight
            if block.factors is not None:
                dropped = weight * block.factors
                score_grad *= block.factors
            to_v.index_add_(0, block.keys, (dropped[..., None] * grad).flatten(0, 1))
            score_grad.sub_(delta[block.rows, None]).mul_(weight).mul_(ctx.scale)
            to_q[block.rows] = torch.bmm(score_grad[:, None], block.k).squeeze(1)
            to_k.index_add_(0, block.keys, (score_grad[..., None] * block.q).flatten(0, 1))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


class _Block(NamedTuple):
    """Queries `rows` of all B·H·Lq and their keys. q: (n, 1, D). k, v: (n, K, D). keys: (n·K), numbers among all
    B·H·Lk; empty slots contain an arbitrary key of the head. score: (n, K), scale·q·k, −∞ in empty slots. factors:
    dropout factors of the probabilities, (n, K), or None.
    """

    rows: slice
    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    score: Tensor
    factors: Tensor | None


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float, dropout: PairDropout | None, dtype: torch.dtype
) -> Iterator[_Block]:
    (batch, heads, queries, head_dim), keys, slots = q.shape, k.shape[2], index.shape[3]
    flat_q, flat_k, flat_v = (x.flatten(0, 2) for x in (q, k, v))
    index = index.expand(batch, heads, -1, -1)
    step = max(1, _GATHERED_ELEMENTS // (slots * head_dim))
    for start in range(0, len(flat_q), step):
        number = torch.arange(start, min(start + step, len(flat_q)), device=q.device)
        row, query = number // queries, number % queries  # row: sequence · H + head
        key = index[row // heads, row % heads, query].long()  # (n, K)
        empty = key < 0
        flat = (key.clamp_min_(0) + row[:, None] * keys).flatten()
        rows = slice(start, start + len(number))
        block_q = flat_q[rows, None].to(dtype)
        block_k, block_v = (x.index_select(0, flat).view(-1, slots, head_dim).to(dtype) for x in (flat_k, flat_v))
        factors = None
        if dropout is not None:
            factors = dropout.factors(dropout.queries.flatten()[rows, None], dropout.keys(keys)[key], dtype)
        score = torch.bmm(block_q, block_k.transpose(1, 2)).squeeze(1).mul_(scale).masked_fill_(empty, -torch.inf)
        yield _Block(rows, block_q, block_k, block_v, flat, score, factors)
