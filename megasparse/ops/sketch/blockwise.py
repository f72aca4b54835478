"""The sketch in tiles: memory O(L·K), never O(L²).

B batch, H heads, L length, Lq queries, d width of the sketch, K keys a query chooses, T queries and C keys in a tile:
`draws.KEYS`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.ops.autocast import Function, without_autocast
from megasparse.ops.blocks import at_most
from megasparse.ops.random import random_bits
from megasparse.ops.sketch.draws import Noise, keys_in_tile
from megasparse.ops.sketch.specification import KeyChoiceSpec

_SCORE_ELEMENTS = 1 << 20  # scores in a tile
_PROJECTED = 1 << 12  # tokens projected at a time in float64
_STEPS = 256  # without noise, products are rounded to multiples of 1/256
_NOTHING = torch.iinfo(torch.int64).min  # ranks below every key
_LOW = (1 << 32) - 1


class _Sight(NamedTuple):
    """Which keys a query may see: see operator.py."""

    causal: bool
    key_mask: Tensor | None
    segments: Tensor | None

    def hides_nothing(self, first_query: int, last_key: int) -> bool:
        """Whether queries from the position `first_query` on surely see all keys up to `last_key`."""
        unmasked = self.key_mask is None and self.segments is None
        return unmasked and (not self.causal or last_key <= first_query)

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions (T) and (C) -> (B|1, T, C) bool."""
        seen = torch.ones(1, len(queries), len(keys), dtype=torch.bool, device=queries.device)
        if self.causal:
            seen = seen & (keys <= queries[:, None])
        if self.key_mask is not None:
            seen = seen & self.key_mask[:, queries, None] & self.key_mask[:, None, keys]
        if self.segments is not None:
            seen = seen & (self.segments[:, queries, None] == self.segments[:, None, keys])
        return seen


@without_autocast
def sketched_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None = None, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes `operator.sketched_attention`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    sight = _Sight(causal, key_mask, segments)
    h, lse = _SketchedAttention.apply(q.to(dtype), k.to(dtype), v.to(dtype), sight)
    return h, lse


class _SketchedAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sight: _Sight) -> tuple[Tensor, Tensor]:
        h, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        for rows, last in _tiles(q, sight):
            score = _scores(q, k, sight, rows, last)
            highest = score.amax(-1, keepdim=True).clamp_min_(torch.finfo(q.dtype).min)
            weight = score.sub_(highest).exp_()
            total = weight.sum(-1, keepdim=True)
            h[:, rows] = (weight @ v[:, :last]).div_(total.clamp_min(torch.finfo(q.dtype).tiny))
            lse[:, rows] = (highest + total.log_()).squeeze(-1)  # −∞ where nothing is visible
        ctx.sight = sight
        ctx.save_for_backward(q, k, v, h, lse)
        return h, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, grad_lse = grads
        q, k, v, h, lse = ctx.saved_tensors
        blind = lse == -torch.inf
        delta = ((grad * h).sum(-1) - grad_lse.masked_fill(blind, 0.0)).unsqueeze(-1)
        lse = lse.masked_fill(blind, torch.inf).unsqueeze(-1)  # exp(score − ∞) = 0: no gradient from these queries
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, last in _tiles(q, ctx.sight):
            weight = _scores(q, k, ctx.sight, rows, last).sub_(lse[:, rows]).exp_()
            dv[:, :last] += weight.transpose(-1, -2) @ grad[:, rows]
            score_grad = (grad[:, rows] @ v[:, :last].transpose(-1, -2)).sub_(delta[:, rows]).mul_(weight)
            score_grad *= q.shape[2] ** -0.5
            dq[:, rows] = score_grad @ k[:, :last]
            dk[:, :last] += score_grad.transpose(-1, -2) @ q[:, rows]
        return dq, dk, dv, None


def _tiles(q: Tensor, sight: _Sight) -> Iterator[tuple[slice, int]]:
    """Queries of a tile, and the number of keys that it may see."""
    batch, length, _ = q.shape
    step = max(1, at_most(_SCORE_ELEMENTS) // (batch * length))
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield slice(start, stop), stop if sight.causal else length


def _scores(q: Tensor, k: Tensor, sight: _Sight, rows: slice, last: int) -> Tensor:
    """Return q·k/√d of a tile, −∞ where not visible: (B, T, `last`)."""
    score = (q[:, rows] @ k[:, :last].transpose(-1, -2)).mul_(q.shape[2] ** -0.5)
    first = rows.start if sight.hides_nothing(rows.start, rows.start) else 0  # of the keys that may be hidden
    if not sight.hides_nothing(rows.start, last - 1):
        queries, keys = (torch.arange(start, last, device=q.device) for start in (rows.start, first))
        score[..., first:].masked_fill_(~sight.pairs(queries[: rows.stop - rows.start], keys), -torch.inf)
    return score


@without_autocast
@torch.no_grad()
def chosen_keys(
    q: Tensor,
    k: Tensor,
    spec: KeyChoiceSpec,
    noise: Noise | None,
    lse: Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    first_query: int = 0,
) -> Tensor:
    """Computes `operator.chosen_keys`. s is computed in float64 but for the logarithms, and ranked in fp32."""
    sight, count = _Sight(spec.causal, key_mask, segments), spec.count
    batch, queries, _ = q.shape
    heads = 1 if noise is None else len(noise.heads)
    index = torch.empty(batch, heads, queries, count, dtype=torch.int32, device=q.device)
    tile = keys_in_tile()
    step = max(1, at_most(_SCORE_ELEMENTS) // (batch * heads * min(tile, k.shape[1])))
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        positions = torch.arange(rows.start, rows.stop, device=q.device) + first_query
        last = first_query + rows.stop if spec.causal else k.shape[1]
        best = torch.full((batch, heads, len(positions), count), _NOTHING, device=q.device)
        for first_key in range(0, min(last, k.shape[1]), tile):
            keys = torch.arange(first_key, min(first_key + tile, last, k.shape[1]), device=q.device)
            # In float64: the same keys have the same score in every tile.
            score = q[:, rows].double() @ k[:, keys].double().transpose(-1, -2) * q.shape[2] ** -0.5
            if noise is not None:
                log_p = _log_p(score, spec.sampling, None if lse is None else lse[:, rows, None])
                log_s = _log_uniform(noise, rows, first_key // tile, len(keys)).add_(log_p.float()[:, None])
            else:
                log_s = score.mul_(_STEPS).round_().div_(_STEPS).float()[:, None]
            ranks = torch.empty(*best.shape[:3], count + len(keys), dtype=torch.int64, device=q.device)
            ranks[..., :count] = best
            _put_ranks(ranks[..., count:], log_s, keys)
            if not sight.hides_nothing(first_query + rows.start, first_key + len(keys) - 1):
                ranks[..., count:].masked_fill_(~sight.pairs(positions, keys)[:, None], _NOTHING)
            best = ranks.topk(count, dim=-1).values  # (B, H, T, K)
        index[:, :, rows] = torch.where(best == _NOTHING, -1, _LOW - (best & _LOW)).to(torch.int32)
    return index


def _log_p(score: Tensor, sampling: str, lse: Tensor | None) -> Tensor:
    """Return log p up to a constant of the row. score: q·k/√d. lse: (B, T, 1)."""
    if sampling == "random":
        return torch.zeros_like(score)
    if sampling in ("raw", "top_k"):
        return score
    assert lse is not None
    minus_log_alpha = (lse - score).clamp_min_(0.0)  # below 0 only by rounding
    return minus_log_alpha.log_().mul_(-2.0 if sampling == "inverse_log_squared" else -1.0)


def _log_uniform(noise: Noise, rows: slice, tile: int, keys: int) -> Tensor:
    """Return log u, (B, H, T, C) fp32, of the first `keys` keys of a tile; u one of the 2^23 numbers (n + ½)/2^23."""
    own = noise.rows[:, rows]
    u = torch.empty(len(own), len(noise.heads), own.shape[1], keys, device=own.device)
    for head in range(len(noise.heads)):
        u[:, head] = random_bits(noise.tile(head, tile), own, keys).bitwise_right_shift_(9)  # −2^22 … 2^22 − 1
    return u.add_((1 << 22) + 0.5).mul_(2.0**-23).log_()


def _put_ranks(ranks: Tensor, score: Tensor, keys: Tensor) -> None:
    """Fills ranks with int64 numbers in the order of the fp32 scores, and among equal ones of falling position."""
    bits = score.add_(0.0).view(torch.int32)  # −0 becomes 0
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    ranks.copy_(bits).bitwise_left_shift_(32).add_(_LOW - keys)


@torch.no_grad()
def exact_projection(x: Tensor, weight: Tensor) -> Tensor:
    """Computes `operator.exact_projection`."""
    return torch.cat([F.linear(part.double(), weight.double()) for part in x.split(at_most(_PROJECTED), dim=1)], dim=1)
