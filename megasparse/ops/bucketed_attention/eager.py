"""Bucketed attention in blocks of windows: linear memory, forward and backward, deterministic.

Rows (one batch element's head) are sorted round by round into chunks of M tokens. A chunk's queries meet the keys of
their own chunk and of the one before, which covers the band and the chunk window alike. Row after row lies in one
array, each row led by an empty chunk, so that all windows are slices at one stride and never copied.

The forward keeps q, k, v, the bucket codes, the output and its log-sum-exp z over all rounds. The backward recomputes
scores block by block: exp(score − log N − z) is a pair's final weight, whatever its round, so rounds need no
statistics of their own.

B batch, H heads, R rounds, L length, D head dim, M chunk, G rows at a time, n chunks a row, W windows in a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megasparse.ops.bucketed_attention.layout import Window, lay_out

_ROW_ELEMENTS = 1 << 23  # numbers in one sorted copy of q, k or v
_SCORE_ELEMENTS = 1 << 18  # scores in a block: 1 MB of fp32, so that it stays in cache
_NOWHERE = -(1 << 30)  # the slot of an empty place


@dataclass(frozen=True)
class _Rule:
    """Everything about visibility that is not a tensor."""

    window: Window
    causal: bool
    scale: float
    exclude_self: bool
    count_rounds: bool


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
    assert causal or window.kind == "chunk", "the band is causal by construction"
    rule = _Rule(window, causal, scale, exclude_self, count_rounds)
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
        rule: _Rule,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        z = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
        for rows in _row_groups(q, k, v, codes, key_mask, segments, rule):
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
        rule: _Rule = ctx.rule
        dtype = z.dtype
        grad_out = grad_out.to(dtype)
        grad_z = torch.where(z == -torch.inf, 0.0, grad_z)
        if key_mask is not None:
            grad_out = grad_out.masked_fill(~key_mask[:, None, :, None], 0.0)
        delta = (grad_out * out).sum(-1) - grad_z  # (B, H, L)
        blind = z == -torch.inf if alone is None else alone | (z == -torch.inf)
        level = z.masked_fill(blind, torch.inf)  # exp(score − ∞) = 0: no window gives these queries a gradient
        dq, dk, dv = (torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format) for _ in range(3))
        for rows in _row_groups(q, k, v, codes, key_mask, segments, rule):
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


@dataclass
class _Rows:
    """A group of G rows with their layout. `place`: which rows. q, k, v: (G, L, D). order, slot: (G, R, L)."""

    place: slice
    q: Tensor
    k: Tensor
    v: Tensor
    order: Tensor
    slot: Tensor
    rule: _Rule

    @property
    def rounds(self) -> int:
        return self.order.shape[1]

    def sort(self, round_: int) -> "_Sorted":
        """The empty chunk that leads each row, the row's tokens in this round's order, and empty places up to a whole
        chunk.
        """
        count, _, length = self.order.shape
        chunk = self.rule.window.chunk
        padded = (-(-length // chunk) + 1) * chunk
        index = torch.zeros(count, padded, dtype=torch.int64, device=self.order.device)
        index[:, chunk : chunk + length] = self.order[:, round_]
        return _Sorted(self, round_, index, chunk, length)


class _Sorted:
    """One round of a group of rows as chunks: C = 1 + G·(n + 1) of them, the first one empty.

    Window w is the queries of chunk w + 1 and the keys of chunks w and w + 1.
    """

    def __init__(self, rows: _Rows, round_: int, index: Tensor, chunk: int, length: int):
        self.rows, self.rule, self.chunk, self.length = rows, rows.rule, chunk, length
        self.index = index  # (G, (n+1)·M)
        first_row = torch.arange(index.shape[0], device=index.device)[:, None] * length
        self.flat = (index + first_row).flatten()
        self.windows = index.numel() // chunk
        slots = rows.slot.gather(2, index[:, None].expand(-1, rows.rounds, -1))  # (G, R, (n+1)·M)
        slots[..., :chunk] = _NOWHERE
        slots[..., chunk + length :] = _NOWHERE
        self.round = round_
        self.slots = [self._lead(slots[:, r], _NOWHERE) for r in range(rows.rounds)]
        needs_position = self.rule.window.kind == "chunk" and (self.rule.causal or self.rule.exclude_self)
        self.position = self._lead(index, 0) if needs_position else None

    def _lead(self, x: Tensor, fill: int) -> Tensor:
        lead = torch.full((self.chunk,), fill, dtype=x.dtype, device=x.device)
        return torch.cat([lead, x.flatten()]).view(-1, self.chunk)  # (C, M)

    def take(self, x: Tensor) -> Tensor:
        """x (G, L, ...) in sorted order with zeros at empty places: (C, M, ...)."""
        tail = x.shape[2:]
        chunks = torch.empty(self.chunk + self.flat.numel(), *tail, dtype=x.dtype, device=x.device)
        chunks[: self.chunk] = 0
        torch.index_select(x.flatten(0, 1), 0, self.flat, out=chunks[self.chunk :])
        body = chunks[self.chunk :].view(x.shape[0], -1, *tail)
        body[:, : self.chunk] = 0
        body[:, self.chunk + self.length :] = 0
        return chunks.view(-1, self.chunk, *tail)

    def put_back(self, chunks: Tensor, out: Tensor, add: bool) -> None:
        """The inverse of `take`: chunks (C, M, ...) into, or added to, out (G, L, ...)."""
        body = chunks[1:].view(out.shape[0], -1, *out.shape[2:])[:, self.chunk : self.chunk + self.length]
        flat = self.flat.view(out.shape[0], -1)[:, self.chunk : self.chunk + self.length].flatten()
        target = out.flatten(0, 1)
        values = body.flatten(0, 1)
        # Each token stands once in a round's order, so neither is a race.
        if add:
            target.index_add_(0, flat, values)
        else:
            target.index_copy_(0, flat, values)

    def blocks(self) -> Iterator[slice]:
        step = max(1, _SCORE_ELEMENTS // (2 * self.chunk * self.chunk))
        for start in range(0, self.windows, step):
            yield slice(start, min(start + step, self.windows))

    def queries(self, chunks: Tensor, block: slice) -> Tensor:
        return chunks[block.start + 1 : block.stop + 1]  # (W, M, ...)

    def keys(self, chunks: Tensor, block: slice) -> Tensor:
        """(W, 2M, ...): overlapping views, nothing is copied."""
        part = chunks[block.start : block.stop + 1]
        size = (block.stop - block.start, 2 * self.chunk, *chunks.shape[2:])
        return part.as_strided(size, (part.stride(0), *part.stride()[1:]))

    def scores(self, q: Tensor, k: Tensor, block: slice) -> Tensor:
        """scale·q·k − log N where visible, −∞ elsewhere: (W, M, 2M)."""
        score = torch.bmm(self.queries(q, block), self.keys(k, block).transpose(1, 2))
        if self.rule.scale != 1.0:
            score *= self.rule.scale
        seen = self._in_window(self.round, block)
        if len(self.slots) > 1 and self.rule.count_rounds:
            count = torch.ones_like(score)
            for other in range(len(self.slots)):
                if other != self.round:
                    count += self._in_window(other, block)
            score -= count.log_()
        return score.masked_fill_(~seen, -torch.inf)

    def _in_window(self, round_: int, block: slice) -> Tensor:
        slots = self.slots[round_]
        distance = self.queries(slots, block)[:, :, None] - self.keys(slots, block)[:, None, :]
        # In a band only the token itself is at distance 0.
        nearest = 1 if self.rule.exclude_self and self.rule.window.kind == "band" else 0
        seen = (distance >= nearest) & (distance < self.rule.window.width)
        if self.position is not None and round_ == self.round:
            i, j = self.queries(self.position, block)[:, :, None], self.keys(self.position, block)[:, None, :]
            if self.rule.causal:
                seen &= (j < i) if self.rule.exclude_self else (j <= i)
            else:
                seen &= j != i
        return seen


def _row_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | None,
    key_mask: Tensor | None,
    segments: Tensor | None,
    rule: _Rule,
) -> Iterator[_Rows]:
    batch, heads, length, head_dim = q.shape
    if codes is None:
        codes = torch.zeros(batch, 1, 1, length, dtype=torch.int16, device=q.device)
    order, slot = lay_out(codes, rule.window, key_mask, segments)
    order, slot = (x.expand(-1, heads, -1, -1).flatten(0, 1) for x in (order, slot))
    dtype = torch.promote_types(q.dtype, torch.float32)
    size = max(1, _ROW_ELEMENTS // (length * head_dim))
    for start in range(0, batch * heads, size):
        place = slice(start, min(start + size, batch * heads))
        q_rows, k_rows, v_rows = (x.flatten(0, 1)[place].to(dtype) for x in (q, k, v))
        yield _Rows(place, q_rows, k_rows, v_rows, order[place], slot[place], rule)


def _forward_rows(rows: _Rows, out: Tensor, z: Tensor) -> None:
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
    rows: _Rows, grad_out: Tensor, level: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
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
    """Adds gradients of overlapping key windows (W, 2M, D) to chunks (C, M, D)."""
    half = chunks.shape[1]
    chunks[block.start : block.stop] += windows[:, :half]
    chunks[block.start + 1 : block.stop + 1] += windows[:, half:]
