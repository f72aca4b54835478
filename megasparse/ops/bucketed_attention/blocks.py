"""Bucketed attention in blocks of tiles: linear memory, forward and backward, deterministic. Tiles as in layouts.py.

A pair that N rounds select is included in the first of them only, which needs fewer passes than N times with weight
1/N. The log-sum-exp over all rounds is stored in base e (lse) and in base 2 (lse2), because for scores of 1e10 a
conversion would be off by thousands. The backward recomputes scores block by block: exp2(score − lse2) is the final
weight of a pair in any round. Scores are in units of log2 e, because exp2 is several times faster than exp.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from megasparse.ops.bucketed_attention.layouts import (
    LOWEST,
    SCORE_ELEMENTS,
    RangeLayout,
    RowGroup,
    TileBlock,
)
from megasparse.ops.bucketed_attention.sorted_layout import SortedLayout
from megasparse.ops.bucketed_attention.spec import BucketedAttentionSpec, Codes, split_codes
from megasparse.ops.operator import Function, wide_dtype
from megasparse.ops.random import PairDropout

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)


def bucketed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | Codes | None,
    spec: BucketedAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    *,
    dropout: PairDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the keys that share a bucket with the query in at least one hash round (Reformer Eq. 2–6, appendix A).

    out_i = Σ_r Σ_j exp(scale·q_i·k_j − log N_ij − lse_i) v_j over the keys j visible to i in round r. N_ij is the
    number of rounds in which j is visible to i (1 without spec.count_rounds).

    Args:
        q, k, v: (B, H, L, D). Scores must be below 2^90 in absolute value.
        codes: (B, H, R, L) integer buckets, or (B, 1, R, L) for all heads; None means one bucket and one round. A pair
            contains the buckets of queries and of keys: the window must then be a band, the last M keys of the query's
            bucket at or before it and, if not causal, the next M; and a query without visible keys attends to itself
            (unless spec.self_at_last is false).
        spec: The window and the visible pairs.
        key_mask: (B, L) bool, True for real tokens. Padding neither attends nor is attended to.
        segments: (B, L) document numbers >= 0. Tokens attend only to their own document.
        dropout: Applied to the probabilities; lse includes dropped pairs.

    Returns:
        out (B, H, L, D) in q's dtype and the log-sum-exp of the scores (B, H, L), computed in fp32 or wider; 0 and −∞
        for padding.
    """
    query_codes, key_codes = split_codes(codes)
    assert key_codes is None or spec.window.kind == "band", "the chunk window needs codes shared by queries and keys"
    out, lse = _BucketedAttention.apply(q, k, v, query_codes, spec, key_mask, segments, key_codes, dropout)
    return out, lse


def row_groups(
    layout: SortedLayout | RangeLayout, q: Tensor, k: Tensor, v: Tensor, spec: BucketedAttentionSpec,
    shared_codes: bool, dropout: PairDropout | None,
) -> Iterator[RowGroup]:  # fmt: skip
    """Yield groups of rows that fit into a block, at least one each. layout: tensors (B|1, H|1, R, L)."""
    batch, heads, length, _ = q.shape
    tensors = [x.expand(-1, heads, -1, -1) for x in layout]
    dtype = wide_dtype(q)
    step = max(1, SCORE_ELEMENTS // layout.pairs(spec, length))
    for start in range(0, batch * heads, step):
        index = slice(start, min(start + step, batch * heads))
        q_rows, k_rows, v_rows, *parts = map(take_rows, (q, k, v, *tensors), repeat(index))
        group_dropout = None if dropout is None else replace(dropout, queries=take_rows(dropout.queries, index))
        yield RowGroup(index, q_rows, k_rows, v_rows, type(layout)(*parts), spec, dtype, shared_codes, group_dropout)


def take_rows(x: Tensor, index: slice) -> Tensor:
    """Return rows of x (B, H, ...) as (G, ...): a view, or a copy of these rows only."""
    if x.is_contiguous():
        return x.flatten(0, 1)[index]
    return torch.stack([x[divmod(row, x.shape[1])] for row in range(index.start, index.stop)])


class _BucketedAttention(Function):
    @staticmethod
    def forward(  # noqa: PLR0913  (autograd takes no structures of tensors)
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, codes: Tensor | None, spec: BucketedAttentionSpec,
        key_mask: Tensor | None, segments: Tensor | None, key_codes: Tensor | None, dropout: PairDropout | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype = wide_dtype(q)
        out = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        lse2 = torch.full(q.shape[:3], LOWEST, dtype=dtype, device=q.device)
        layout: SortedLayout | RangeLayout
        ctx.shared_codes = key_codes is None
        if codes is None or spec.window.kind == "chunk" or (ctx.shared_codes and not spec.causal):
            layout = SortedLayout.of(q, codes, spec.window, key_mask, segments)
        else:
            layout = RangeLayout.of(codes, key_codes, spec, key_mask, segments)
        for rows in row_groups(layout, q, k, v, spec, ctx.shared_codes, dropout):
            row_out = out.flatten(0, 1)[rows.index]  # (G, L, D)
            row_lse2 = lse2.flatten(0, 1)[rows.index]  # (G, L)
            _attend(rows, rows.layout.blocks(rows), row_out, row_lse2)
        no_visible_key = lse2 < 0.5 * LOWEST
        lse = (lse2 / _LOG2_E).masked_fill_(no_visible_key, -torch.inf)
        self_only = None
        # Queries with no visible key attend to themselves.
        if spec.self_at_last and (spec.exclude_self or key_codes is not None):
            queries = no_visible_key if key_mask is None else no_visible_key & key_mask[:, None]
            self_only = queries.nonzero(as_tuple=True)
            out[self_only] = _own_value(v[self_only].to(dtype), self_only, dropout, v.shape[2])
            lse[self_only] = (q[self_only].to(dtype) * k[self_only]).sum(-1) * spec.scale
        if key_mask is not None:
            out.masked_fill_(~key_mask[:, None, :, None], 0.0)
            lse.masked_fill_(~key_mask[:, None], -torch.inf)
            no_visible_key |= ~key_mask[:, None]
        lse2.masked_fill_(no_visible_key, torch.inf)  # exp2(score − ∞) = 0: no gradient from tiles
        out = out.to(q.dtype)
        ctx.spec = spec
        ctx.self_only = self_only
        ctx.dropout = dropout
        ctx.layout = type(layout)
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
        for rows in row_groups(ctx.layout(*layout), q, k, v, spec, ctx.shared_codes, ctx.dropout):
            row_grad, row_out, row_grad_lse, row_lse2 = (
                take_rows(x, rows.index) for x in (grad_out, out, grad_lse, lse2)
            )
            row_dq, row_dk, row_dv = (x.flatten(0, 1)[rows.index] for x in (dq, dk, dv))  # (G, L, D)
            delta = (row_grad.to(rows.dtype) * row_out).sum(-1).sub_(row_grad_lse)  # (G, L)
            for block in rows.layout.blocks(rows):
                block_q = block.queries(rows.q).mul_(spec.scale * _LOG2_E)
                grad = block.queries(row_grad)
                block_k = block.keys(rows.k)
                block_v = block.keys(rows.v)
                level = block.queries(row_lse2)
                if block.real is not None:
                    level.masked_fill_(~block.real, torch.inf)  # no gradient from slots that repeat a query
                weight = block.scores(block_q, block_k).sub_(level.unsqueeze(-1)).exp2_()
                score_grad = torch.bmm(grad, block_v.transpose(1, 2))  # (n, T, K)
                dropped = weight
                if rows.dropout is not None:
                    factors = block.factors(rows.dropout)
                    dropped = weight * factors
                    score_grad *= factors
                block.add_to_keys(row_dv, dropped, grad)
                score_grad.sub_(block.queries(delta).unsqueeze(-1)).mul_(weight)
                block.add_to_queries(row_dq, torch.bmm(score_grad, block_k))
                block.add_to_keys(row_dk, score_grad, block_q)
            row_dq.mul_(spec.scale)
            row_dk.div_(_LOG2_E)
        if ctx.self_only is not None:  # for these tokens out = v and lse = scale·q·k
            self_only = ctx.self_only
            slope = grad_lse[self_only].unsqueeze(-1) * spec.scale
            dq[self_only] += slope * k[self_only]
            dk[self_only] += slope * q[self_only]
            dv[self_only] += _own_value(grad_out[self_only], self_only, ctx.dropout, v.shape[2])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None, None


def _attend(rows: RowGroup, blocks: Iterable[TileBlock], out: Tensor, lse2: Tensor) -> None:
    """Update the rows' outputs (G, L, D), initially 0, and base-2 log-sum-exps (G, L), initially LOWEST."""
    for block in blocks:
        block_q = block.queries(rows.q).mul_(rows.spec.scale * _LOG2_E)
        score = block.scores(block_q, block.keys(rows.k))  # (n, T, K)
        highest = score.amax(-1, keepdim=True).clamp_min_(LOWEST)
        weight = _exp2(score.sub_(highest))
        total = weight.sum(-1, keepdim=True).clamp_min_(torch.finfo(rows.dtype).tiny)
        if rows.dropout is not None:
            weight *= block.factors(rows.dropout)
        part = torch.bmm(weight, block.keys(rows.v)).div_(total)  # (n, T, D)
        current = merged = highest.add_(total.log2_()).squeeze(-1)
        if not block.first_round:  # rounds are merged by log-sum-exp
            before = block.queries(lse2)
            merged = torch.maximum(before, current).add_(_power(-(before - current).abs_()).add_(1.0).log2_())
            part.sub_(block.queries(out)).mul_(_power(current - merged).unsqueeze(-1))
        block.add_to_queries(out, part)
        lse2.flatten(0, 1).index_copy_(0, *block.real_queries(merged))


class QueryBlock(TileBlock):
    """Block of single-query tiles, one per row, with the shape and key columns of the query's tile in a full pass, so
    that outputs are bit-identical.

    rows: (n,) row numbers. tokens, hidden: (n, K), key of each column in its row, arbitrary if hidden. keys: number of
    keys per row. tile: T of the full pass. first_round: no earlier block computed outputs of these rows.
    """

    def __init__(
        self, rows: Tensor, tokens: Tensor, hidden: Tensor, keys: int, tile: int, like: Tensor, first_round: bool = True
    ):  # fmt: skip
        self._rows = len(rows)
        if len(rows) == 1:  # bmm may sum a single matrix in a different order
            rows, tokens, hidden = (x.repeat_interleave(2, 0) for x in (rows, tokens, hidden))
        self.first_round = first_round
        self._columns = hidden
        self.dtype = wide_dtype(like)
        # With at least 8 rows, a row of a product does not depend on their number.
        self.query_tokens = rows[:, None].expand(-1, min(tile, 8))
        self.key_tokens = rows[:, None] * keys + tokens

    def hidden(self) -> Tensor:
        return self._columns[:, None].repeat(1, self.query_tokens.shape[1], 1)

    def real_queries(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_tokens[: self._rows, 0], values[: self._rows, 0]

    def add_to_keys(self, x: Tensor, weight: Tensor, values: Tensor) -> None:
        raise NotImplementedError("decoding from a cache does not support gradients")


def query_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: BucketedAttentionSpec, blocks: Iterable[QueryBlock]
) -> tuple[Tensor, Tensor]:
    """Compute `bucketed_attention` of one query per row, without `self_at_last`, from its blocks, round by round. q:
    (B, H, 1, D). k, v: (B, H, capacity, D), contiguous, of a cache.
    """
    dtype = wide_dtype(q)
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    out = torch.zeros_like(flat_q, dtype=dtype)
    lse2 = torch.full(flat_q.shape[:2], LOWEST, dtype=dtype, device=q.device)
    _attend(RowGroup(slice(None), flat_q, flat_k, flat_v, None, spec, dtype, True), blocks, out, lse2)
    lse = (lse2 / _LOG2_E).masked_fill_(lse2 < 0.5 * LOWEST, -torch.inf)
    return out.to(q.dtype).view_as(q), lse.view(q.shape[:3])


def _exp2(x: Tensor) -> Tensor:
    """Compute 2^x in place, with bits that do not depend on an element's index: with more than 2^15 numbers torch uses
    another function for a thread's last elements.
    """
    for part in x.view(-1).split(1 << 15):
        part.exp2_()
    return x


def _power(x: Tensor) -> Tensor:
    """Compute 2^x in place with exp, which is slower but does not depend on the index."""
    return x.mul_(_LN_2).exp_()


def _own_value(x: Tensor, self_only: tuple[Tensor, ...], dropout: PairDropout | None, keys: int) -> Tensor:
    """Apply dropout to the values (n, D) of the tokens `self_only`."""
    if dropout is None:
        return x
    factors = dropout.factors(dropout.queries[self_only], dropout.keys(keys)[self_only[2]], x.dtype)
    return x * factors.unsqueeze(-1)
