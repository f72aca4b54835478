"""Bucketed attention in blocks of windows: linear memory, forward and backward, deterministic.

The forward keeps q, k, v, the bucket codes, the output and its log-sum-exp z over all rounds. The backward recomputes
scores block by block: exp(score − log N − z) is a pair's final weight, whatever its round, so rounds need no
statistics of their own.

B batch, H heads, R rounds, L length, D head dim, M chunk, G rows at a time, C chunks of them, W windows in a block, S
chunks of keys a window.
"""

from typing import Any

import torch
from torch import Tensor

from megasparse.ops.bucketed_attention.chunks import Rows, Rule, row_groups
from megasparse.ops.bucketed_attention.layout import Window


def bucketed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | None,
    window: Window,
    *,
    causal: bool,
    scale: float = 1.0,
    exclude_self: bool = True,
    count_rounds: bool = True,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out_i = Σ_r Σ_j exp(q_i·k_j·scale − log N_ij − z_i) v_j over the keys j visible in round r (Reformer Eq. 2–6,
    appendix A).

    q, k, v: (B, H, L, D). codes: (B, H, R, L) integer buckets; None is one bucket and one round (local attention).
    N_ij: the number of rounds in which j is visible to i (1 if not count_rounds). With exclude_self a token sees
    itself only when it sees nothing else. key_mask: (B, L) bool, true for real tokens: padding sees nothing and is
    never seen. segments: (B, L) document numbers >= 0: documents never see each other.
    Returns out (B, H, L, D) in q's dtype and z (B, H, L), the log of the sum, in fp32 at least; padding gets 0 and −∞.
    Scores, softmax statistics and gradients are computed in fp32 at least.
    """
    rule = Rule(window, causal, scale, exclude_self, count_rounds)
    out, z = _BucketedAttention.apply(q, k, v, codes, key_mask, segments, rule)
    return out, z


class _BucketedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        codes: Tensor | None,
        key_mask: Tensor | None,
        segments: Tensor | None,
        rule: Rule,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        z = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
        for rows in row_groups(q, k, v, codes, key_mask, segments, rule):
            _forward_rows(rows, out.flatten(0, 1)[rows.place], z.flatten(0, 1)[rows.place])
        if rule.exclude_self:
            alone = z == -torch.inf  # sees no other token: its own value, with its own score
            out = torch.where(alone[..., None], v.to(dtype), out)
            z = torch.where(alone, (q.to(dtype) * k).sum(-1) * rule.scale, z)
        else:
            alone = None
        if key_mask is not None:
            out = out.masked_fill(~key_mask[:, None, :, None], 0.0)
            z = z.masked_fill(~key_mask[:, None], -torch.inf)
        out = out.to(q.dtype)
        ctx.rule = rule
        ctx.save_for_backward(q, k, v, codes, key_mask, segments, out, z, alone)
        return out, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_out, grad_z = grads
        q, k, v, codes, key_mask, segments, out, z, alone = ctx.saved_tensors
        rule: Rule = ctx.rule
        dtype = z.dtype
        grad_out = grad_out.to(dtype)
        grad_z = torch.where(z == -torch.inf, 0.0, grad_z)
        if key_mask is not None:
            grad_out = grad_out.masked_fill(~key_mask[:, None, :, None], 0.0)
        delta = (grad_out * out).sum(-1) - grad_z  # (B, H, L)
        blind = z == -torch.inf if alone is None else alone | (z == -torch.inf)
        level = z.masked_fill(blind, torch.inf)  # exp(score − ∞) = 0: no window gives these queries a gradient
        dq, dk, dv = (torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format) for _ in range(3))
        for rows in row_groups(q, k, v, codes, key_mask, segments, rule):
            sources = [x.flatten(0, 1)[rows.place] for x in (grad_out, level, delta)]
            _backward_rows(rows, *sources, *(x.flatten(0, 1)[rows.place] for x in (dq, dk, dv)))
        if alone is not None:  # out = v and z = scale·q·k there
            only = alone[..., None]
            if key_mask is not None:
                only = only & key_mask[:, None, :, None]
            own = torch.where(only, grad_z[..., None] * rule.scale, 0.0)
            dq += own * k
            dk += own * q
            dv += torch.where(only, grad_out, 0.0)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _forward_rows(rows: Rows, out: Tensor, z: Tensor) -> None:
    """Fills out (G, L, D) and z (G, L); rounds are merged by log-sum-exp."""
    for round_ in range(rows.rounds):
        sorted_ = rows.sort(round_)
        q, k, v = (sorted_.take(x) for x in (rows.q, rows.k, rows.v))
        part = torch.zeros_like(v)
        part_z = torch.zeros(v.shape[:2], dtype=z.dtype, device=z.device)
        for block in sorted_.blocks():
            score = sorted_.scores(q, k, block)
            highest = score.amax(-1, keepdim=True).clamp_min_(torch.finfo(score.dtype).min)
            weight = score.sub_(highest).exp_()
            total = weight.sum(-1, keepdim=True)
            inverse = torch.where(total > 0, 1.0 / total, 0.0)
            torch.bmm(weight, sorted_.keys(v, block), out=sorted_.queries(part, block)).mul_(inverse)
            sorted_.queries(part_z, block).copy_((highest + total.log()).squeeze(-1))
        if round_ == 0:
            sorted_.put_back(part, out, add=False)
            sorted_.put_back(part_z, z, add=False)
        else:
            this_out, this_z = torch.empty_like(out), torch.empty_like(z)
            sorted_.put_back(part, this_out, add=False)
            sorted_.put_back(part_z, this_z, add=False)
            merged = torch.logaddexp(z, this_z)
            level = merged.masked_fill(merged == -torch.inf, 0.0)
            out.mul_((z - level).exp_().unsqueeze(-1)).addcmul_(this_out, (this_z - level).exp_().unsqueeze(-1))
            z.copy_(merged)


def _backward_rows(
    rows: Rows, grad_out: Tensor, level: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Adds the windows' gradients to dq, dk, dv (G, L, D)."""
    for round_ in range(rows.rounds):
        sorted_ = rows.sort(round_)
        q, k, v, g = (sorted_.take(x) for x in (rows.q, rows.k, rows.v, grad_out))
        levels, deltas = sorted_.take(level), sorted_.take(delta)
        parts = [torch.zeros_like(x) for x in (q, k, v)]
        for block in sorted_.blocks():
            weight = sorted_.scores(q, k, block).sub_(sorted_.queries(levels, block)[..., None]).exp_()
            grad = sorted_.queries(g, block)
            _add_to_keys(parts[2], torch.bmm(weight.transpose(1, 2), grad), block)
            score_grad = torch.bmm(grad, sorted_.keys(v, block).transpose(1, 2))
            score_grad.sub_(sorted_.queries(deltas, block)[..., None]).mul_(weight)
            if rows.rule.scale != 1.0:
                score_grad *= rows.rule.scale
            torch.bmm(score_grad, sorted_.keys(k, block), out=sorted_.queries(parts[0], block))
            _add_to_keys(parts[1], torch.bmm(score_grad.transpose(1, 2), sorted_.queries(q, block)), block)
        for part, total in zip(parts, (dq, dk, dv), strict=True):
            sorted_.put_back(part, total, add=True)


def _add_to_keys(chunks: Tensor, windows: Tensor, block: slice) -> None:
    """Adds gradients of overlapping key windows (W, S·M, D) to chunks (C, M, D)."""
    chunk = chunks.shape[1]
    for i, part in enumerate(windows.split(chunk, dim=1)):
        chunks[block.start + i : block.stop + i] += part
