"""Bucketed attention in blocks of windows: linear memory, forward and backward, deterministic.

A pair seen in N rounds counts in the first of them and in no other: a sum of N Nths with fewer passes over the scores.
The forward keeps q, k, v, the layout, the output and its log-sum-exp over all rounds, in base e (lse) and in base 2
(lse2): for scores of 1e10 a rescaled one would be off by thousands. The backward recomputes scores block by block:
exp2(score − lse2) is a pair's final weight, whatever its round, so rounds need no statistics of their own.

B batch, H heads, R rounds, L length, D head dim, G rows at a time, W tiles in a block, T queries and S·T keys a tile.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megasparse.ops.bucketed_attention.chunks import LOWEST, Rows, SortedLayout, take_rows
from megasparse.ops.bucketed_attention.range_tiles import RangeLayout
from megasparse.ops.bucketed_attention.specification import BucketedAttentionSpec
from megasparse.ops.operator import Function, without_autocast
from megasparse.ops.random import PairDropout

_LOG2_E = math.log2(math.e)


@without_autocast
def bucketed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | None,
    spec: BucketedAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    key_codes: Tensor | None = None,
    dropout: PairDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `operator.bucketed_attention`. A score is to be less than 2^90 in size."""
    out, lse = _BucketedAttention.apply(q, k, v, codes, spec, key_mask, segments, key_codes, dropout)
    return out, lse


class _BucketedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, codes: Tensor | None, spec: BucketedAttentionSpec,
        key_mask: Tensor | None, segments: Tensor | None, key_codes: Tensor | None, dropout: PairDropout | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        lse2 = torch.full(q.shape[:3], LOWEST, dtype=dtype, device=q.device)
        layout: SortedLayout | RangeLayout
        if key_codes is None:
            layout = SortedLayout.of(q, codes, spec.window, key_mask, segments)
        else:
            assert codes is not None
            layout = RangeLayout.of(codes, key_codes, spec, key_mask, segments)
        for rows in layout.groups(q, k, v, spec, dropout):
            _forward_rows(rows, out.flatten(0, 1)[rows.place], lse2.flatten(0, 1)[rows.place])
        blind = lse2 < 0.5 * LOWEST
        lse = (lse2 / _LOG2_E).masked_fill_(blind, -torch.inf)
        alone = None
        # Who sees no other token has its own value, with its own score.
        if spec.self_at_last and (spec.exclude_self or key_codes is not None):
            alone = blind.nonzero(as_tuple=True)
            out[alone] = _own_value(v[alone].to(dtype), alone, dropout, v.shape[2])
            lse[alone] = (q[alone].to(dtype) * k[alone]).sum(-1) * spec.scale
        if key_mask is not None:
            out.masked_fill_(~key_mask[:, None, :, None], 0.0)
            lse.masked_fill_(~key_mask[:, None], -torch.inf)
            blind |= ~key_mask[:, None]
        lse2.masked_fill_(blind, torch.inf)  # exp2(score − ∞) = 0: no tile gives these queries a gradient
        out = out.to(q.dtype)
        ctx.spec, ctx.alone, ctx.dropout, ctx.layout = spec, alone, dropout, type(layout)
        ctx.save_for_backward(q, k, v, key_mask, out, lse, lse2, *layout)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse = grads
        q, k, v, key_mask, out, lse, lse2, *layout = ctx.saved_tensors
        spec: BucketedAttentionSpec = ctx.spec
        grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0.0)
        if key_mask is not None:
            grad_out = grad_out.masked_fill(~key_mask[:, None, :, None], 0.0)
        dq, dk, dv = (torch.zeros_like(q, dtype=lse.dtype, memory_format=torch.contiguous_format) for _ in range(3))
        for rows in ctx.layout(*layout).groups(q, k, v, spec, ctx.dropout):
            sources = [take_rows(x, rows.place) for x in (grad_out, out, grad_lse, lse2)]
            _backward_rows(rows, *sources, *(x.flatten(0, 1)[rows.place] for x in (dq, dk, dv)))
        if ctx.alone is not None:  # out = v and lse = scale·q·k there
            alone = ctx.alone
            own = grad_lse[alone].unsqueeze(-1) * spec.scale
            dq[alone] += own * k[alone]
            dk[alone] += own * q[alone]
            dv[alone] += _own_value(grad_out[alone], alone, ctx.dropout, v.shape[2])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None, None


def _own_value(x: Tensor, alone: tuple[Tensor, ...], dropout: PairDropout | None, keys: int) -> Tensor:
    """Drops the values (n, D) of the tokens `alone`, which see themselves with probability 1."""
    if dropout is None:
        return x
    own = dropout.factors(dropout.queries[alone], dropout.keys(keys)[alone[2]], x.dtype)
    return x * own.unsqueeze(-1)


def _forward_rows(rows: Rows, out: Tensor, lse2: Tensor) -> None:
    """Fills out (G, L, D) and lse2 (G, L): the log-sum-exp in base 2, near LOWEST where nothing is visible.

    Rounds are merged by log-sum-exp.
    """
    for block in rows.blocks():
        q = block.queries(rows.q).mul_(rows.tiling.spec.scale * _LOG2_E)
        score = block.scores(q, block.keys(rows.k))
        highest = score.amax(-1, keepdim=True).clamp_min_(LOWEST)
        weight = score.sub_(highest).exp2_()
        total = weight.sum(-1, keepdim=True).clamp_min_(torch.finfo(lse2.dtype).tiny)
        if rows.dropout is not None:
            weight *= block.factors(rows.dropout)
        part = torch.bmm(weight, block.keys(rows.v)).div_(total)
        this = merged = highest.add_(total.log2_()).squeeze(-1)
        if not block.first_round:
            merged = torch.logaddexp2(block.queries(lse2), this)
            part = torch.lerp(block.queries(out), part, (this - merged).exp2_().unsqueeze(-1))
        block.put_queries(out, part)
        block.put_queries(lse2, merged)


def _backward_rows(
    rows: Rows,
    grad_out: Tensor,
    out: Tensor,
    grad_lse: Tensor,
    lse2: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Adds the windows' gradients to dq, dk, dv (G, L, D)."""
    delta = (grad_out.to(rows.dtype) * out).sum(-1).sub_(grad_lse)  # (G, L)
    for block in rows.blocks():
        q, grad = block.queries(rows.q).mul_(rows.tiling.spec.scale * _LOG2_E), block.queries(grad_out)
        k, v = block.keys(rows.k), block.keys(rows.v)
        weight = block.scores(q, k).sub_(block.queries(lse2).unsqueeze(-1)).exp2_()
        score_grad, kept = torch.bmm(grad, v.transpose(1, 2)), weight
        if rows.dropout is not None:
            factors = block.factors(rows.dropout)
            kept = weight * factors
            score_grad *= factors
        block.add_to_keys(dv, kept, grad)
        score_grad.sub_(block.queries(delta).unsqueeze(-1)).mul_(weight)
        block.add_to_queries(dq, torch.bmm(score_grad, k))
        block.add_to_keys(dk, score_grad, q)
    dq.mul_(rows.tiling.spec.scale)
    dk.div_(_LOG2_E)
