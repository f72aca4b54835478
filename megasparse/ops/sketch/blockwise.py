"""The sketch in tiles: memory O(L·K), never O(L²).

B batch, H heads, L length, Lq queries, d width of the sketch, K keys a query chooses, T queries and C keys in a tile:
`draws.KEYS`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.ops.autocast import without_autocast
from megasparse.ops.blocks import at_most
from megasparse.ops.random import random_bits
from megasparse.ops.sketch.draws import Noise, keys_in_tile
from megasparse.ops.sketch.specification import KeyChoiceSpec
from megasparse.ops.tiled import tiled

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
    batch, length, width = q.shape
    keys = torch.arange(length, device=q.device)

    def attend(q: Tensor, position: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score = (q @ k.transpose(-1, -2)) * width**-0.5
        seen = sight.pairs(position[0], keys)
        blind = ~seen.any(-1, keepdim=True)  # kept out of the softmax, whose gradient would be NaN
        score = score.masked_fill(~seen, -torch.inf).masked_fill(blind, 0.0)
        lse = torch.logsumexp(score, dim=-1, keepdim=True)
        h = torch.exp(score - lse) @ v
        return torch.cat([h.masked_fill(blind, 0.0), lse.masked_fill(blind, -torch.inf)], dim=-1)

    tiles = -(-batch * length * length // at_most(_SCORE_ELEMENTS))
    result = tiled(attend, (q.to(dtype), keys.expand(batch, -1)), (k.to(dtype), v.to(dtype)), tiles)
    return result[..., :-1], result[..., -1]


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
                log_s = log_p.float()[:, None] + _log_uniform(noise, rows, first_key // tile, len(keys))
            else:
                log_s = (score * _STEPS).round().div_(_STEPS).float()[:, None]
            ranks = _ranks(log_s, keys).masked_fill_(~sight.pairs(positions, keys)[:, None], _NOTHING)
            best = torch.cat([best, ranks], dim=-1).topk(count, dim=-1).values  # (B, H, T, K)
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
    draws = [random_bits(noise.tile(head, tile), noise.rows[:, rows], keys) for head in range(len(noise.heads))]
    whole = torch.stack(draws, dim=1).bitwise_right_shift_(9).add_(1 << 22)
    return whole.float().add_(0.5).mul_(2.0**-23).log_()


def _ranks(score: Tensor, keys: Tensor) -> Tensor:
    """Return int64 numbers in the order of the fp32 scores, and among equal ones of falling position."""
    bits = (score + 0.0).view(torch.int32)  # −0 becomes 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) + (_LOW - keys)


@torch.no_grad()
def exact_projection(x: Tensor, weight: Tensor) -> Tensor:
    """Computes `operator.exact_projection`."""
    return torch.cat([F.linear(part.double(), weight.double()) for part in x.split(at_most(_PROJECTED), dim=1)], dim=1)
