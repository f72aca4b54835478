"""Attention utility per bucket, tile after tile: never all tokens with all buckets at once.

ψ_i[b] = Σ_{j: h_K(j) = b} A_ij is how much of query i's attention goes to the keys of bucket b (LHA Eq. 11), ψ′_j[b] ∝
Σ_{i: h_Q(i) = b} A_ij how much of the attention that key j gets comes from the queries of bucket b (Eq. 14); A =
softmax(qkᵀ/√D). Both are targets to learn: nothing here has a gradient. A sequence is one document without padding.
`visible`: only pairs j <= i count; else all pairs do, under a causal mask too (the paper).

B batch, H heads, L length, D head dim, F features, N buckets, T tokens of a tile.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_CPU_TILE_ELEMENTS = 1 << 19  # of a tile's tokens with all buckets: 2 MB of fp32
_GPU_TILE_ELEMENTS = 1 << 25


class Tile(NamedTuple):
    """utility: (B, H, T, N), ψ or ψ′ of the tokens `tokens`, each row of sum 1, or 0 where all of it underflowed."""

    tokens: slice
    utility: Tensor


class Features(NamedTuple):
    """Positive random features of queries or keys: φ = values·exp(shift), (B, H, L, F) and (B, H, L, 1)."""

    values: Tensor
    shift: Tensor


@torch.no_grad()
def exact_queries(
    q: Tensor, k: Tensor, key_codes: Tensor, buckets: int, *, scale: float, visible: bool
) -> Iterator[Tile]:
    """ψ in O(L²) time. q: (B, H, Lq, D). k: (B, H, Lk, D). key_codes: (B, H, Lk). scale: 1/√D."""
    for tokens in tiles(q, max(buckets, k.shape[2])):
        attention = torch.softmax(_query_scores(q, k, tokens, scale, visible), dim=-1)
        yield Tile(tokens, _by_bucket(attention, key_codes, buckets))


@torch.no_grad()
def exact_keys(
    q: Tensor, k: Tensor, query_codes: Tensor, buckets: int, *, scale: float, visible: bool
) -> Iterator[Tile]:
    """ψ′ in O(L²) time, as `exact_queries`. query_codes: (B, H, Lq)."""
    z = [_query_scores(q, k, tokens, scale, visible).logsumexp(-1) for tokens in tiles(q, k.shape[2])]
    level = torch.cat(z, dim=-1).unsqueeze(-2)  # (B, H, 1, Lq)
    query = torch.arange(q.shape[2], device=q.device)
    for tokens in tiles(k, max(buckets, q.shape[2])):
        logarithm = _products(k[:, :, tokens], q, scale) - level  # ln A, (B, H, T, Lq)
        if visible:
            logarithm = logarithm.masked_fill(query < query[tokens, None], -torch.inf)
        # A softmax over the queries: its normaliser is one that ψ′ has anyway, and it cannot underflow.
        yield Tile(tokens, _by_bucket(torch.softmax(logarithm, dim=-1), query_codes, buckets))


def feature_queries(q: Features, k: Features, key_codes: Tensor, buckets: int, *, visible: bool) -> Iterator[Tile]:
    """ψ_i[b] ∝ φ(q_i)·Σ_{j: h_K(j) = b} φ(k_j) (Eq. 16) in O(L·N) time. q, k: features of x/D^(1/4). key_codes: (B, H,
    Lk).
    """
    return _visible_queries(q, k, key_codes, buckets) if visible else _all_queries(q, k, key_codes, buckets)


def feature_keys(q: Features, k: Features, query_codes: Tensor, buckets: int, *, visible: bool) -> Iterator[Tile]:
    """ψ′_j[b] ∝ Σ_{i: h_Q(i) = b} φ(q_i)/(φ(q_i)·Σ_j′ φ(k_j′)) · φ(k_j) (Eq. 17) in O(L·N) time. query_codes: (B, H,
    Lq).
    """
    return _visible_keys(q, k, query_codes, buckets) if visible else _all_keys(q, k, query_codes, buckets)


def bucket_sums(x: Tensor, codes: Tensor, buckets: int) -> Tensor:
    """Σ_{j: codes_j = b} x_j of every bucket: (B, H, N, F) from x (B, H, L, F) and codes (B, H, L)."""
    sums = x.new_zeros(*x.shape[:2], buckets, x.shape[3])
    return sums.scatter_add_(2, codes.long().unsqueeze(-1).expand_as(x), x)


def tiles(x: Tensor, width: int, *, pairs: bool = False) -> Iterator[slice]:
    """Cuts x (B, H, L, ...) along L so that (B, H, T, width) numbers make a tile; pairs: (B, H, T, T) numbers too."""
    elements = _CPU_TILE_ELEMENTS if x.device.type == "cpu" else _GPU_TILE_ELEMENTS
    each = elements // max(1, x.shape[0] * x.shape[1])
    step = max(1, min(each // width, math.isqrt(each)) if pairs else each // width)
    for start in range(0, x.shape[2], step):
        yield slice(start, min(start + step, x.shape[2]))


def _products(x: Tensor, y: Tensor, scale: float) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (x.to(dtype) * scale) @ y.to(dtype).transpose(-1, -2)


def _query_scores(q: Tensor, k: Tensor, tokens: slice, scale: float, visible: bool) -> Tensor:
    """scale·q_i·k_j of the queries `tokens`, −∞ where not visible: (B, H, T, Lk)."""
    score = _products(q[:, :, tokens], k, scale)
    if not visible:
        return score
    key = torch.arange(k.shape[2], device=k.device)
    return score.masked_fill(key > key[tokens, None], -torch.inf)


def _by_bucket(weights: Tensor, codes: Tensor, buckets: int) -> Tensor:
    """Sums weights (B, H, T, L) over the tokens of each bucket: (B, H, T, N)."""
    return _add_pairs(weights.new_zeros(*weights.shape[:3], buckets), weights, codes)


def _add_pairs(total: Tensor, weights: Tensor, codes: Tensor) -> Tensor:
    return total.scatter_add_(-1, codes.long().unsqueeze(-2).expand_as(weights), weights)


def _normalized(utility: Tensor) -> Tensor:
    total = utility.sum(-1, keepdim=True)
    return torch.where(total > 0, utility / total, 0.0)


@torch.no_grad()
def _all_queries(q: Features, k: Features, key_codes: Tensor, buckets: int) -> Iterator[Tile]:
    highest = k.shift.amax(-2, keepdim=True)
    sums = bucket_sums(k.values * torch.exp(k.shift - highest), key_codes, buckets).transpose(-1, -2)
    for tokens in tiles(q.values, buckets):
        yield Tile(tokens, _normalized(q.values[:, :, tokens] @ sums))


@torch.no_grad()
def _all_keys(q: Features, k: Features, query_codes: Tensor, buckets: int) -> Iterator[Tile]:
    highest = k.shift.amax(-2, keepdim=True)
    total = (k.values * torch.exp(k.shift - highest)).sum(-2, keepdim=True)
    normaliser = (q.values * total).sum(-1, keepdim=True)  # at any scale of φ(q): it cancels
    weights = torch.where(normaliser > 0, q.values / normaliser, 0.0)
    sums = bucket_sums(weights, query_codes, buckets).transpose(-1, -2)
    for tokens in tiles(k.values, buckets):
        yield Tile(tokens, _normalized(k.values[:, :, tokens] @ sums))


def _levels(k: Features) -> Tensor:
    """The highest shift at or before each token, (B, H, L, 1): no later token makes earlier sums underflow."""
    return k.shift.cummax(-2).values


def _visible_pairs(q: Tensor, k: Features, level: Tensor, tokens: slice) -> Tensor:
    """q_i·φ(k_j)·exp(−level_i) of a tile's pairs j <= i, else 0: (B, H, T, T)."""
    decay = k.shift[:, :, tokens].transpose(-1, -2) - level[:, :, tokens]
    later = torch.ones(decay.shape[-2:], dtype=torch.bool, device=decay.device).triu(1)
    return (q[:, :, tokens] @ k.values[:, :, tokens].transpose(-1, -2)) * decay.masked_fill(later, -torch.inf).exp()


@torch.no_grad()
def _visible_queries(q: Features, k: Features, key_codes: Tensor, buckets: int) -> Iterator[Tile]:
    """Sums over the tiles before, at the level `before`, and pairs inside the tile."""
    level = _levels(k)
    before = torch.full_like(level[:, :, :1], -torch.inf)
    sums = k.values.new_zeros(*k.values.shape[:2], buckets, k.values.shape[3])
    for tokens in tiles(k.values, buckets, pairs=True):
        codes, last = key_codes[:, :, tokens], level[:, :, tokens.stop - 1 : tokens.stop]
        utility = (q.values[:, :, tokens] @ sums.transpose(-1, -2)) * torch.exp(before - level[:, :, tokens])
        yield Tile(tokens, _normalized(_add_pairs(utility, _visible_pairs(q.values, k, level, tokens), codes)))
        keys = k.values[:, :, tokens] * torch.exp(k.shift[:, :, tokens] - last)
        sums = sums * torch.exp(before - last) + bucket_sums(keys, codes, buckets)
        before = last


@torch.no_grad()
def _visible_keys(q: Features, k: Features, query_codes: Tensor, buckets: int) -> Iterator[Tile]:
    """From the last tile to the first: sums over the tiles after, at the level `after`, and pairs inside the tile."""
    level = _levels(k)
    weights = _visible_weights(q, k, level, buckets)
    after = level[:, :, -1:]
    sums = k.values.new_zeros(*k.values.shape[:2], buckets, k.values.shape[3])
    for tokens in reversed(list(tiles(k.values, buckets, pairs=True))):
        keys, queries, own = k.values[:, :, tokens], weights[:, :, tokens], level[:, :, tokens]
        codes, first = query_codes[:, :, tokens], own[:, :, :1]
        earlier = torch.ones(own.shape[2], own.shape[2], dtype=torch.bool, device=own.device).tril(-1)
        decay = (own - own.transpose(-1, -2)).masked_fill(earlier, -torch.inf)  # 0 and below: levels only rise
        pairs = (keys @ queries.transpose(-1, -2)) * decay.exp()
        utility = (keys @ sums.transpose(-1, -2)) * torch.exp(own - after)
        yield Tile(tokens, _normalized(_add_pairs(utility, pairs, codes)))
        sums = sums * torch.exp(first - after) + bucket_sums(queries * torch.exp(first - own), codes, buckets)
        after = first


def _visible_weights(q: Features, k: Features, level: Tensor, buckets: int) -> Tensor:
    """φ(q_i)/(φ(q_i)·Σ_{j <= i} φ(k_j))·exp(level_i): (B, H, L, F)."""
    before = torch.full_like(level[:, :, :1], -torch.inf)
    total = torch.zeros_like(k.values[:, :, :1])
    parts = []
    for tokens in tiles(k.values, buckets, pairs=True):
        queries, last = q.values[:, :, tokens], level[:, :, tokens.stop - 1 : tokens.stop]
        normaliser = (queries * total).sum(-1, keepdim=True) * torch.exp(before - level[:, :, tokens])
        normaliser = normaliser + _visible_pairs(q.values, k, level, tokens).sum(-1, keepdim=True)
        parts.append(torch.where(normaliser > 0, queries / normaliser, 0.0))
        keys = k.values[:, :, tokens] * torch.exp(k.shift[:, :, tokens] - last)
        total = total * torch.exp(before - last) + keys.sum(-2, keepdim=True)
        before = last
    return torch.cat(parts, dim=2)
