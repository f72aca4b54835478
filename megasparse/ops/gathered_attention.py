"""Exact softmax attention of every query to a few keys given by an index (Smart Bird).

The blockwise form needs linear memory, and is deterministic on a CPU: heads with equal keys and index share a gather,
which the backward repeats.

G key heads, I lists of an index, S shares of H/S = R heads with one gather, K index slots, n queries of a share per
block.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megasparse.ops.operator import Function, operator, wide_dtype
from megasparse.ops.random import PairDropout

_GATHERED_ELEMENTS = 1 << 19  # numbers in a block's gathered keys: 2 MB of fp32, to fit in cache


@operator(cast=2)
def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, scale: float, dropout: PairDropout | None = None
) -> tuple[Tensor, Tensor]:
    """Compute out_i = Σ_j exp(scale·q_i·k_j − lse_i) v_j over the keys j in row i of the index.

    Args:
        q: (B, H, Lq, D).
        k, v: (B, G, Lk, D), a divisor G of H: each key head serves H/G neighbouring heads.
        index: (B|1, I, Lq, K) int32 or int64 key numbers, a divisor I of H, −1 in empty slots; repeated keys are
            included repeatedly.
        dropout: Dropout of the probabilities; lse includes all pairs.

    Returns:
        out (B, H, Lq, D) and lse (B, H, Lq) as in `bucketed_attention`, 0 and −∞ for queries with no visible key.
    """
    size = len(q) * math.lcm(k.shape[1], index.shape[1]) * index.shape[2:].numel() * q.shape[3]
    numpy = q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64) and not torch.is_grad_enabled()
    if numpy and q.shape[2] == 1 and dropout is None and size <= _GATHERED_ELEMENTS:  # others: bits as with gradients
        return _one_block(q, k, v, index, scale)
    out, lse = _GatheredAttention.apply(q, k, v, index, scale, dropout)
    return out, lse


class _GatheredAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float, dropout: PairDropout | None
    ) -> tuple[Tensor, Tensor]:
        if any(ctx.needs_input_grad):
            k = k.contiguous()
            v = v.contiguous()
        dtype = wide_dtype(q)
        shares = math.lcm(k.shape[1], index.shape[1])
        outs = q.new_empty(len(q) * shares * q.shape[2], q.shape[1] // shares, q.shape[3])
        lses = outs.new_empty(outs.shape[:2], dtype=dtype)
        for block in _blocks(q, k, v, index, scale, dropout, dtype):
            highest = block.score.amax(-1, keepdim=True).clamp_min_(torch.finfo(dtype).min)
            weight = block.score.sub_(highest).exp_()
            total = weight.sum(-1, keepdim=True)
            weight *= 1.0 / total.clamp_min(1.0)  # the largest weight is 1, unless all slots are empty
            lses[block.rows] = (highest + total.log_()).squeeze(-1)
            if block.factors is not None:
                weight *= block.factors
            outs[block.rows] = torch.bmm(weight, block.v).to(q.dtype)
        out = _by_head(outs, q)
        lse = _by_head(lses, q)
        ctx.scale = scale
        ctx.dropout = dropout
        ctx.save_for_backward(q, k, v, index, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse = grads
        q, k, v, index, out, lse = ctx.saved_tensors
        dtype = lse.dtype
        shares = math.lcm(k.shape[1], index.shape[1])
        delta, lse = backward_statistics(grad_out, grad_lse, out, lse)
        delta, lse, grad_out = (_by_share(x, shares) for x in (delta, lse, grad_out))
        to_q = torch.zeros_like(grad_out, dtype=dtype)
        dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
        to_k, to_v = (x.flatten(0, 2) for x in (dk, dv))  # (B·G·Lk, D)
        for block in _blocks(q, k, v, index, ctx.scale, ctx.dropout, dtype):
            to_q[block.rows] = block.gradients(grad_out, delta, lse, ctx.scale, to_k, to_v)
        return _by_head(to_q, q).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _one_block(q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute a new token by NumPy, whose calls take half of the time of torch's."""
    batch, groups, _, dim = k.shape
    _, lists, queries, slots = index.shape
    shares = math.lcm(groups, lists)
    (k, v, *steps) = _lines(k, v)
    first = _firsts(batch, shares, (*steps, groups), (len(index), lists, queries))[0]
    line = index.numpy().repeat(shares // lists, axis=1)  # (B|1, S, Lq, K)
    bias = np.where(line < 0, -np.inf, 0.0).astype(np.float32).reshape(len(index), -1, 1, slots)
    line = (np.maximum(line, 0) + first.reshape(batch, shares, 1, 1)).reshape(batch, -1, slots)
    chosen_k, chosen_v = (x.numpy(force=True).take(line, axis=0) for x in (k, v))  # (B, S·Lq, K, D)
    shared_q = _by_share(q, shares).numpy(force=True).reshape(batch, -1, q.shape[1] // shares, dim)
    score = np.matmul(shared_q, chosen_k.swapaxes(2, 3))  # (B, S·Lq, R, K)
    score *= scale
    score += bias
    highest = np.maximum(score.max(-1, keepdims=True), np.finfo(score.dtype).min)
    weight = np.exp(score - highest)
    total = weight.sum(-1, keepdims=True)
    out = np.matmul(weight / np.maximum(total, 1.0), chosen_v)
    with np.errstate(divide="ignore"):
        lse = (highest + np.log(total)).reshape(-1, score.shape[2])
    return _by_head(torch.from_numpy(out).flatten(0, 1), q), _by_head(torch.from_numpy(lse), q)


def _lines(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Return keys and values (B, G, L, D) as lines (n, D), of a cache without a copy, and the number of lines of a
    sequence and of a key head.
    """
    batch, groups, length, dim = k.shape
    if k.stride() != v.stride() or k.stride()[2:] != (dim, 1) or k.stride(0) % dim or k.stride(1) % dim:
        k = k.contiguous()
        v = v.contiguous()
    sequence = k.stride(0) // dim
    group = k.stride(1) // dim
    size = (batch - 1) * sequence + (groups - 1) * group + length, dim
    return k.as_strided(size, (dim, 1)), v.as_strided(size, (dim, 1)), sequence, group


def _by_share(x: Tensor, shares: int) -> Tensor:
    return x.unflatten(1, (shares, -1)).transpose(2, 3).flatten(0, 2)


def _by_head(x: Tensor, q: Tensor) -> Tensor:
    """Undo `_by_share` for the heads of q (B, H, Lq, D), contiguously."""
    batch, heads, queries, _ = q.shape
    return x.unflatten(0, (batch, -1, queries)).transpose(2, 3).reshape(batch, heads, queries, *x.shape[2:])


class PairBlock(NamedTuple):
    """Queries and their keys. rows: slice or numbers of the queries. q: (n, R, D). k, v: (n, K, D). keys: (n·K),
    numbers among all contiguous keys, arbitrary for invisible pairs. score: (n, R, K), scale·q·k, −∞ for invisible
    pairs. factors: of dropout, (n, R, K), or None.
    """

    rows: Any
    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    score: Tensor
    factors: Tensor | None

    def gradients(
        self, grad_out: Tensor, delta: Tensor, lse: Tensor, scale: float, to_k: Tensor, to_v: Tensor
    ) -> Tensor:
        """Return the gradients (n, R, D) of the queries, and add the keys' to to_k and to_v. Overwrites the scores.

        grad_out, delta, lse: of all rows, see `backward_statistics`.
        """
        weight = self.score.sub_(lse[self.rows].unsqueeze(-1)).exp_()
        grad = grad_out[self.rows].to(weight.dtype)  # (n, R, D)
        score_grad = torch.bmm(grad, self.v.transpose(1, 2))  # (n, R, K)
        dropped = weight
        if self.factors is not None:
            dropped = weight * self.factors
            score_grad *= self.factors
        to_v.index_add_(0, self.keys, torch.bmm(dropped.transpose(1, 2), grad).flatten(0, 1))
        score_grad.sub_(delta[self.rows].unsqueeze(-1)).mul_(weight).mul_(scale)
        to_k.index_add_(0, self.keys, torch.bmm(score_grad.transpose(1, 2), self.q).flatten(0, 1))
        return torch.bmm(score_grad, self.k)


def backward_statistics(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ grad_out·out − grad_lse, and lse, which is ∞ for queries with no visible key: exp(score − ∞) = 0."""
    no_visible_key = lse == -torch.inf
    delta = (grad_out.to(lse.dtype) * out).sum(-1) - grad_lse.masked_fill(no_visible_key, 0.0)
    return delta, lse.masked_fill(no_visible_key, torch.inf)


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float, dropout: PairDropout | None, dtype: torch.dtype
) -> Iterator[PairBlock]:
    batch, groups, length, dim = k.shape
    _, lists, queries, slots = index.shape
    shares = math.lcm(groups, lists)
    (k, v, *steps) = _lines(k, v)
    first = torch.from_numpy(_firsts(batch, shares, (*steps, groups), (len(index), lists, queries))).to(q.device)
    lines = first[0, :, None].expand(-1, queries).flatten()  # (B·S·Lq)
    at = (first[1, :, None] + torch.arange(queries, device=q.device)).flatten()
    q = _by_share(q, shares)
    index = index.flatten(0, 2)  # (lists, K)
    step = min(len(q), max(1, _GATHERED_ELEMENTS // (slots * dim)))
    chosen = [x.new_empty(step * slots, dim) for x in (k, v)]  # one buffer: new memory costs more than the copies
    for start in range(0, len(q), step):
        block = slice(start, min(start + step, len(q)))
        key = index.index_select(0, at[block]).long()  # (n, K)
        empty = key < 0
        line = (key.clamp_min_(0) + lines[block, None]).flatten()  # (n·K)
        block_q = q[block].to(dtype)
        block_k, block_v = (
            torch.index_select(x, 0, line, out=buffer[: len(line)]).view(-1, slots, dim).to(dtype)
            for x, buffer in zip((k, v), chosen, strict=True)
        )
        factors = None
        if dropout is not None:
            of_query = _by_share(dropout.queries, shares)[block, :, None]
            of_key = dropout.keys(length)[key][:, None]
            factors = dropout.factors(of_query, of_key, dtype)
        score = torch.bmm(block_q, block_k.transpose(1, 2)).mul_(scale).masked_fill_(empty[:, None], -torch.inf)
        yield PairBlock(block, block_q, block_k, block_v, line, score, factors)


@lru_cache(maxsize=64)
def _firsts(batch: int, shares: int, steps: tuple[int, int, int], lists: tuple[int, int, int]) -> np.ndarray:
    """Return the first line and the first query's list of each sequence and share, (2, B·S). steps: lines of a sequence
    and of a key head, and G. lists: sizes of the index's first dimensions.
    """
    sequence, group, groups = steps
    sequences, count, queries = lists
    rows = [(number, share) for number in range(batch) for share in range(shares)]
    lines = [number * sequence + share * groups // shares * group for number, share in rows]
    firsts = [(number % sequences * count + share * count // shares) * queries for number, share in rows]
    return np.array([lines, firsts], dtype=np.int64)
