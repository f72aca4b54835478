"""Smart Bird's sketch: a narrow single-head attention, and the keys that every head samples from its weights.

Memory O(L·K), never O(L²). d width of the sketch, K keys per query, T queries and C keys per tile, see `KEYS`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.ops.gathered_attention import backward_statistics
from megasparse.ops.operator import (
    MOST_PAIRS,
    Function,
    counted,
    implementation,
    operator,
    wide_dtype,
    without_autocast,
)
from megasparse.ops.random import Key, halves, random_bits, subkey

KEYS = 1 << 11
"""Keys per tile. Random draws depend on it, because each tile uses a separate random key."""
WIDEST = 16
"""The largest d that the kernels support: a thread keeps all coordinates of its rows in registers."""
_SCORE_ELEMENTS = 3 << 19  # scores per tile on a CPU
_SCORE_ELEMENTS_ON_GPU = 1 << 24  # 128 MB of float64
_GATHERED_ELEMENTS = 1 << 24  # coordinates gathered at a time
_PROJECTED = 1 << 12  # tokens projected at a time in float64
_WIDE = 1 << 15  # keys per tile without noise
_BEHIND = 2.0**-24  # subtracted from a rank per position, in steps: of equal scores the smaller position wins
_STEPS = 256  # without noise, products are rounded to multiples of 1/256
_ROWS = 16  # with fewer queries, products are in float64: a bound of the error of fp32 costs a pass over the keys
_LARGEST = 2.0**28  # of a rank without noise: 24 bits remain for the position
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # supported by the kernels of the choice
_NOTHING = torch.iinfo(torch.int64).min  # rank below every key
_LOW = (1 << 32) - 1


@dataclass(frozen=True)
class KeyChoiceSpec:
    """Settings of the choice of keys. count: K. sampling: function from a key's weight α to its rank p:
    "inverse_log_squared" (1/log α)², "inverse_log" −1/log α, "raw" and "top_k" α, "random" 1.
    """

    count: int
    causal: bool
    sampling: Literal["inverse_log_squared", "inverse_log", "raw", "top_k", "random"]


class Noise(NamedTuple):
    """Inputs of u_ij. key: random key of the layer. heads: global indices. rows: (B, Lq), see `RngContext.rows`."""

    key: Key
    heads: range
    rows: Tensor

    def tile(self, number: int, tile: int) -> Key:
        """Return the random key of a tile of local head `number`."""
        return subkey(self.key, self.heads[number], tile)

    def tiles(self, length: int) -> Tensor:
        """Return the halves of the keys of every head's tiles for `length` keys, (H, tiles, 2) int32 on the device."""
        device = self.rows.device
        seeds = [
            [halves(self.tile(number, tile)) for tile in range(-(-length // KEYS))] for number in range(len(self.heads))
        ]
        pinned = device.type == "cuda"  # asynchronous copy
        return torch.tensor(seeds, dtype=torch.int32, pin_memory=pinned).to(device, non_blocking=True)


@operator(largest_width=WIDEST, most_rows=MOST_PAIRS)
def sketched_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None = None, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute h_i = Σ_j α_ij v_j with α_ij = exp(q_i·k_j/√d − lse_i), one head (Smart Bird Eq. 1).

    q, k, v: (B, L, d). key_mask, segments: as in `bucketed_attention`. Returns h (B, L, d) and lse (B, L) in fp32 or
    wider; padding gets 0 and −∞.
    """
    q, k, v = (x.to(wide_dtype(q)) for x in (q, k, v))
    h, lse = _SketchedAttention.apply(q, k, v, Sight(causal, key_mask, segments))
    return h, lse


@without_autocast
@torch.no_grad()
def chosen_keys(
    q: Tensor, k: Tensor, spec: KeyChoiceSpec, noise: Noise | None, lse: Tensor | None = None,
    key_mask: Tensor | None = None, segments: Tensor | None = None, first_query: int = 0,
) -> Tensor:  # fmt: skip
    """Choose the K visible keys with the highest score s_ij = u_ij·p_ij in each row (Smart Bird Eq. 2, 3), best first.

    α = 1 gives p = ∞: the key is chosen for any u. Ties go to the smaller position.

    Args:
        q: (B, Lq, d), the queries from position `first_query` on.
        k: (B, Lk, d).
        spec: K, causality, and the function from α_ij to p_ij.
        noise: u is uniform in (0, 1), a function of (key, global head, global sample, i, j). None means u = 1 for all
            heads: the keys are ranked by q·k/√d, rounded to multiples of 1/256, so that keys that differ only by
            rounding are ordered by position, in decoding as in a full pass.
        lse: From `sketched_attention`; only the inverse logarithms need it.
        key_mask, segments: As in `sketched_attention`.
        first_query: Position of the first query.

    Returns:
        (B, H, Lq, K) int32, H = 1 without noise; −1 if fewer than K keys are visible.
    """
    rows = MOST_PAIRS // (1 if noise is None else len(noise.heads))
    if implementation(q, _FLOATS, WIDEST, rows) == "triton":
        from megasparse.ops import sketch_kernels

        return sketch_kernels.chosen_keys(q, k, spec, noise, lse, key_mask, segments, first_query)
    sight = Sight(spec.causal, key_mask, segments)
    if noise is None:
        return top_keys(q, k, spec.count, sight, first_query)
    return drawn_keys(q, k, spec, noise, lse, sight, first_query)


@without_autocast
@torch.no_grad()
def exact_projection(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x·Wᵀ of x (B, L, E) and weight (d, E) in float64, (B, L, d); of (B, G, L, E) and (G, d, E), (B, G, L, d).
    Each row is independent of the number of rows, so that equal tokens tie, in decoding as in a full pass.
    """
    several = x.dim() == 4 and x.shape[2] < _ROWS  # one product launches less than a kernel per sketch
    if weight.shape[-2] <= WIDEST and not several and implementation(x, _FLOATS, largest_width=None) == "triton":
        from megasparse.ops.sketch_kernels import exact_projection as project

        return torch.stack([*map(project, x.unbind(1), weight)], dim=1) if x.dim() == 4 else project(x, weight)
    wide = weight.double().mT  # (E, d) or (G, E, d)
    parts = [part.double() @ wide for part in x.split(_PROJECTED, dim=-2)]
    return torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0]


class Sight(NamedTuple):
    """Visibility of keys to queries, see `sketched_attention`."""

    causal: bool
    key_mask: Tensor | None
    segments: Tensor | None

    def hides_nothing(self, first_query: int, last_key: int) -> bool:
        """True if queries from position `first_query` on attend to all keys up to `last_key`."""
        unmasked = self.key_mask is None and self.segments is None
        return unmasked and (not self.causal or last_key <= first_query)

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the visibility of keys at positions (C) to queries at positions (T), (B|1, T, C) bool."""
        visible = torch.ones(1, len(queries), len(keys), dtype=torch.bool, device=queries.device)
        if self.causal:
            visible = visible & (keys <= queries[:, None])
        if self.key_mask is not None:
            visible = visible & self.key_mask[:, queries, None] & self.key_mask[:, None, keys]
        if self.segments is not None:
            visible = visible & (self.segments[:, queries, None] == self.segments[:, None, keys])
        return visible


class _SketchedAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
        h = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2])
        for rows, last in _tiles(q, sight):
            score = _scores(q, k, sight, rows, last)
            highest = score.amax(-1, keepdim=True).clamp_min_(torch.finfo(q.dtype).min)
            weight = score.sub_(highest).exp_()
            total = weight.sum(-1, keepdim=True)
            h[:, rows] = (weight @ v[:, :last]).div_(total.clamp_min(torch.finfo(q.dtype).tiny))
            lse[:, rows] = (highest + total.log_()).squeeze(-1)  # −∞ if nothing is visible
        ctx.sight = sight
        ctx.save_for_backward(q, k, v, h, lse)
        return h, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, grad_lse = grads
        q, k, v, h, lse = ctx.saved_tensors
        delta, lse = (x.unsqueeze(-1) for x in backward_statistics(grad, grad_lse, h, lse))  # (B, L, 1)
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
        for rows, last in _tiles(q, ctx.sight):
            weight = _scores(q, k, ctx.sight, rows, last).sub_(lse[:, rows]).exp_()
            dv[:, :last] += weight.transpose(-1, -2) @ grad[:, rows]
            score_grad = (grad[:, rows] @ v[:, :last].transpose(-1, -2)).sub_(delta[:, rows]).mul_(weight)
            score_grad *= q.shape[2] ** -0.5
            dq[:, rows] = score_grad @ k[:, :last]
            dk[:, :last] += score_grad.transpose(-1, -2) @ q[:, rows]
        return dq, dk, dv, None


def _tiles(q: Tensor, sight: Sight) -> Iterator[tuple[slice, int]]:
    """Yield the queries of a tile, and the number of keys that may be visible to them."""
    batch, length, _ = q.shape
    step = _queries_per_tile(q, batch * length)
    for rows, last, times in _query_tiles(q, step, 0, length, sight.causal):
        with counted(times):
            yield rows, last


def _queries_per_tile(q: Tensor, scores: int) -> int:
    """Return the number of queries in a tile, for scores per query of all sequences."""
    return max(1, (_SCORE_ELEMENTS if q.device.type == "cpu" else _SCORE_ELEMENTS_ON_GPU) // scores)


def _query_tiles(
    q: Tensor, step: int, first_query: int, length: int, causal: bool
) -> Iterator[tuple[slice, int, float]]:
    """Yield the queries of each tile, the number of keys that may be visible to them, and 1; on the meta device only
    the last tile, and the pairs of all tiles divided by its pairs.
    """
    queries = q.shape[1]
    starts = range(0, queries, step)
    lasts = [min(first_query + min(start + step, queries), length) if causal else length for start in starts]
    if not q.is_meta:
        for start, last in zip(starts, lasts, strict=True):
            yield slice(start, min(start + step, queries)), last, 1.0
        return
    pairs = sum(last * min(step, queries - start) for start, last in zip(starts, lasts, strict=True))
    rows = slice(max(0, queries - step), queries)
    yield rows, lasts[-1], pairs / (lasts[-1] * (rows.stop - rows.start))


def _scores(q: Tensor, k: Tensor, sight: Sight, rows: slice, last: int) -> Tensor:
    """Return q·k/√d of a tile, −∞ for invisible pairs: (B, T, `last`)."""
    score = (q[:, rows] @ k[:, :last].transpose(-1, -2)).mul_(q.shape[2] ** -0.5)
    first = rows.start if sight.hides_nothing(rows.start, rows.start) else 0  # first key that may be hidden
    if not sight.hides_nothing(rows.start, last - 1):
        queries, keys = (torch.arange(start, last, device=q.device) for start in (rows.start, first))
        score[..., first:].masked_fill_(~sight.pairs(queries[: rows.stop - rows.start], keys), -torch.inf)
    return score


class _ProductTile(NamedTuple):
    """Products (B, T, C), which the next tile overwrites, of the queries `rows` at `positions` (T) and of `keys` (C),
    from first_query and first_key on.
    """

    products: Tensor
    rows: slice
    positions: Tensor
    keys: Tensor
    first_query: int
    first_key: int
    sight: Sight

    def hide(self, ranks: Tensor, nothing: float) -> None:
        """Set the ranks (B, H, T, C) of invisible pairs to `nothing`, in place."""
        sight = self.sight
        if sight.hides_nothing(self.first_query, self.first_key + len(self.keys) - 1):
            return
        first = 0  # key that may be hidden
        if sight.hides_nothing(self.first_query, self.first_query):
            first = max(0, self.first_query - self.first_key)
        ranks[..., first:].masked_fill_(~sight.pairs(self.positions, self.keys[first:])[:, None], nothing)


def _product_tiles(
    q: Tensor, k: Tensor, sight: Sight, first_query: int, width: int, heads: int = 1
) -> Iterator[_ProductTile]:
    """Yield the tiles of q·kᵀ with `width` keys, all tiles of some queries after each other."""
    batch, queries, _ = q.shape
    step = _queries_per_tile(q, batch * heads * min(width, k.shape[1]))
    memory = k.new_empty(batch * min(step, queries) * min(width, k.shape[1]))
    for rows, last, times in _query_tiles(q, step, first_query, k.shape[1], sight.causal):
        positions = torch.arange(rows.start, rows.stop, device=q.device) + first_query
        alike = 1.0 if times == 1.0 else max(1.0, last / width - 1)  # a plan runs two tiles of keys
        for first_key in range(0, last if alike == 1.0 else 2 * width, width):
            keys = torch.arange(first_key, min(first_key + width, last), device=q.device)
            products = memory[: batch * len(positions) * len(keys)].view(batch, -1, len(keys))  # (B, T, C)
            of_keys = k[:, first_key : first_key + len(keys)].transpose(-1, -2)  # (B, d, C)
            with counted(times * alike if first_key else times):
                torch.bmm(q[:, rows], of_keys, out=products)
                yield _ProductTile(products, rows, positions, keys, first_query + rows.start, first_key, sight)


class _BestKeys:
    """Best keys of each query in the tiles so far. index: (B, H, Lq, K) int32 positions, best first, −1 if fewer."""

    def __init__(self, q: Tensor, heads: int, count: int):
        self.count = count
        self.index = torch.full((len(q), heads, q.shape[1], count), -1, dtype=torch.int32, device=q.device)
        self._ranks = q[..., :0]  # of the best keys of the current queries

    def add(self, tile: _ProductTile, ranks: Tensor, nothing: float) -> None:
        """Add a tile's keys with their ranks (B, H, T, C), which are `nothing` for invisible pairs."""
        best, slot = ranks.topk(min(self.count, ranks.shape[-1]), dim=-1)
        self.add_best(tile, best, torch.where(best == nothing, -1, slot + tile.first_key).to(torch.int32))

    def add_best(self, tile: _ProductTile, ranks: Tensor, tokens: Tensor) -> None:
        """Add the ranks and positions of a tile's best keys, (B, H, T, K or fewer)."""
        chosen = self.index[:, :, tile.rows]
        if tile.first_key:
            tokens = torch.cat([chosen[..., : self._ranks.shape[-1]], tokens], dim=-1)
            ranks = torch.cat([self._ranks, ranks], dim=-1)
            ranks, slot = ranks.topk(min(self.count, ranks.shape[-1]), dim=-1)
            tokens = tokens.gather(-1, slot)
        chosen[..., : tokens.shape[-1]] = tokens
        self._ranks = ranks


def drawn_keys(
    q: Tensor, k: Tensor, spec: KeyChoiceSpec, noise: Noise, lse: Tensor | None, sight: Sight, first_query: int
) -> Tensor:
    """Compute `chosen_keys` with noise in tiles: s in float64 except for the logarithms, ranked in fp32."""
    best = _BestKeys(q, len(noise.heads), spec.count)
    for tile in _product_tiles(q.double(), k.double(), sight, first_query, KEYS, len(noise.heads)):
        score = tile.products.mul_(q.shape[2] ** -0.5)
        log_p = _log_p(score, spec.sampling, None if lse is None else lse[:, tile.rows, None])
        rows = noise.rows[:, tile.rows]
        u = torch.empty(len(rows), len(noise.heads), *score.shape[1:], device=rows.device)  # (B, H, T, C)
        for head in range(len(noise.heads)):
            bits = random_bits(noise.tile(head, tile.first_key // KEYS), rows, len(tile.keys))
            u[:, head] = bits.bitwise_right_shift_(9)  # −2^22 … 2^22 − 1
        log_u = u.add_((1 << 22) + 0.5).mul_(2.0**-23).log_()  # u is (n + ½)/2^23, n < 2^23
        # int64 numbers in the order of the scores, then of falling position
        bits = log_u.add_(log_p.float()[:, None]).add_(0.0).view(torch.int32)  # −0 becomes 0
        bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
        ranks = bits.long().bitwise_left_shift_(32).add_(_LOW - tile.keys)
        tile.hide(ranks, _NOTHING)
        best.add(tile, ranks, _NOTHING)
    return best.index


def top_keys(q: Tensor, k: Tensor, count: int, sight: Sight, first_query: int) -> Tensor:
    """Compute `chosen_keys` without noise, from products in float64, so that equal keys have equal ranks in every tile;
    on a CPU in fp32 if these can be rounded as float64 ones.
    """
    best = _BestKeys(q, 1, count)
    if q.device.type != "cpu":
        for tile in _product_tiles(q.double(), k.double(), sight, first_query, _WIDE):
            ranks = rounded_ranks(tile.products[:, None], q.shape[2], tile.keys)  # (B, 1, T, C)
            tile.hide(ranks, -torch.inf)
            best.add(tile, ranks, -torch.inf)
        return best.index
    error = _largest_errors(q, k) if q.shape[1] >= _ROWS else None
    dtype = torch.float64 if error is None else torch.float32
    for tile in _product_tiles(q.to(dtype), k.to(dtype), sight, first_query, _WIDE):
        products = tile.products[:, None]  # (B, 1, T, C)
        tile.hide(products, -torch.inf)
        exact = None
        if error is not None:
            columns = slice(tile.first_key, tile.first_key + len(tile.keys))
            exact = q[:, tile.rows], k[:, columns], error[:, tile.rows]
        best.add_best(tile, *_top_products(products, q.shape[2], tile.first_key, count, exact))
    return best.index


def _largest_errors(q: Tensor, k: Tensor) -> Tensor | None:
    """Return the largest errors of each query's fp32 products, (B, Lq); None if float64 is needed for too many."""
    width = q.shape[2]
    longest = torch.linalg.vector_norm(k.double(), dim=-1).amax(1, keepdim=True)
    error = torch.linalg.vector_norm(q.double(), dim=-1) * longest * (width + 2) * 2.0**-24
    return error if float(error.max()) * _STEPS * width**-0.5 < 0.1 else None


def _top_products(
    products: Tensor, width: int, first: int, count: int, exact: tuple[Tensor, Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return the `count` largest `rounded_ranks` of products (B, 1, T, C) of the keys from position `first` on, or all,
    in falling order, and their positions, −1 for hidden keys, whose products are −∞. On a CPU.

    Only products that reach the K-th largest maximum of a row's blocks, or round to the same number, are ranked: about
    1.4·K of them.

    exact: None for float64 products; for fp32 ones the queries (B, T, d), the keys (B, C, d) and the largest errors (B,
    T) of products, to compute again in float64 those whose rounding the error could change.
    """
    numbers = products.numpy()
    size = products.shape[-1]
    scale = _STEPS * width**-0.5
    bound = np.finfo(numbers.dtype).min
    error = np.zeros(1) if exact is None else exact[2][:, None, :, None].numpy()
    if size > count:
        number = max(1, 2 * size // (3 * count))
        maxima = products[..., : size // number * number].unflatten(-1, (number, -1)).amax(-2).numpy()
        maxima.partition(size // number - count)
        least = maxima[..., size // number - count, None] - np.float64(1.01 / scale) - 2.0 * error
        bound = np.maximum(np.nextafter(least.astype(numbers.dtype), -np.inf), bound)
    chosen = np.flatnonzero(numbers >= bound)
    rows = np.arange(0, products.numel() + 1, size)
    starts = chosen.searchsorted(rows)
    slots = starts[:-1, None] + np.arange(np.diff(starts).max())
    chosen = chosen[np.minimum(slots, len(chosen) - 1)]  # (B·T, about 1.4·K)
    steps = numbers.reshape(-1)[chosen] * np.float64(scale)
    if exact is not None:
        row, slot = np.nonzero(np.abs(steps - np.floor(steps) - 0.5) <= error.reshape(-1, 1) * scale)
        sequence = row // products.shape[2]
        key = chosen[row, slot] % size
        pairs = (x.double().numpy() for x in (exact[0].flatten(0, 1)[row], exact[1][sequence, key]))
        steps[row, slot] = np.einsum("nd,nd->n", *pairs) * scale
    steps = np.rint(np.clip(steps, -_LARGEST, _LARGEST))
    ranks = np.where(slots < starts[1:, None], steps - _BEHIND * (chosen - (rows[:-1, None] - first)), -np.inf)
    ranks.sort()
    values = torch.from_numpy(ranks[:, : -count - 1 : -1].copy()).view(*products.shape[:-1], -1)
    tokens = values.ceil().sub_(values).div_(_BEHIND)
    return values, tokens.masked_fill_(values == -torch.inf, -1).to(torch.int32)


def rounded_ranks(products: Tensor, width: int, keys: Tensor) -> Tensor:
    """Round float64 products q·k/√d to multiples of 1/256, at most 2^20, in place, and order equal ones by position."""
    return products.mul_(_STEPS * width**-0.5).round_().clamp_(-_LARGEST, _LARGEST).sub_(keys, alpha=_BEHIND)


@operator(dtypes=_FLOATS, largest_width=None, differentiable=False)
def gathered_products(q: Tensor, k: Tensor, index: Tensor) -> Tensor:
    """Return the products of each row of q (T, d) with the rows `index` (T, C) int64 of k (N, d): (T, C) float64."""
    step = max(1, _GATHERED_ELEMENTS // (index.shape[1] * k.shape[1]))
    parts = [
        (F.embedding(rows, k).double() @ x.double().unsqueeze(-1)).squeeze(-1)
        for x, rows in zip(q.split(step), index.split(step), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _log_p(score: Tensor, sampling: str, lse: Tensor | None) -> Tensor:
    """Return log p up to a constant per row. score: q·k/√d. lse: (B, T, 1)."""
    if sampling == "random":
        return torch.zeros_like(score)
    if sampling in ("raw", "top_k"):
        return score
    assert lse is not None
    minus_log_alpha = (lse - score).clamp_min_(0.0)  # negative only by rounding
    return minus_log_alpha.log_().mul_(-2.0 if sampling == "inverse_log_squared" else -1.0)
