"""Attention utility per bucket, tile after tile: never all tokens with all buckets at once.

ψ_i[b] ∝ Σ_{j in b} A_ij is how much of query i's attention goes to the keys of bucket b (LHA Eq. 11), ψ′_j[b] ∝
Σ_{i in b} A_ij how much of the attention that key j gets comes from the queries of bucket b (Eq. 14); A =
softmax(qkᵀ/√D). Which tokens a bucket holds comes as a list of members, (B, H, N, M) token numbers; a token may be in
several, or in none. Both are targets to learn: nothing here has a gradient. A sequence is one document without padding.
`visible`: only pairs j <= i count; else all pairs do, under a causal mask too (the paper).

B batch, H heads, L length, D head dim, F features, N buckets, M members of a bucket, T tokens of a tile.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megasparse.ops.dtype import at_least_fp32
from megasparse.ops.hash_learning import unit_sum

_CPU_TILE_ELEMENTS = 1 << 19  # of a tile's tokens with all buckets: 2 MB of fp32
_GPU_TILE_ELEMENTS = 1 << 25


class Tile(NamedTuple):
    """The utility of some tokens. utility: (B, H, T, N), ψ or ψ′ of the tokens `tokens`, each row of sum 1, or 0 where
    all of it underflowed.
    """

    tokens: slice
    utility: Tensor


class Features(NamedTuple):
    """Positive random features of queries or keys: φ = values·exp(shift), (B, H, L, F) and (B, H, L, 1)."""

    values: Tensor
    shift: Tensor


@torch.no_grad()
def exact_queries(q: Tensor, k: Tensor, key_members: Tensor, *, scale: float, visible: bool) -> Iterator[Tile]:
    """Yield ψ, exactly, in O(L²) time. q: (B, H, Lq, D). k: (B, H, Lk, D). scale: 1/√D."""
    for tokens in tiles(q, max(key_members[0, 0].numel(), k.shape[2])):
        attention = torch.softmax(_query_scores(q, k, tokens, scale, visible), dim=-1)
        yield Tile(tokens, unit_sum(_by_bucket(attention, key_members)))


@torch.no_grad()
def exact_keys(q: Tensor, k: Tensor, query_members: Tensor, *, scale: float, visible: bool) -> Iterator[Tile]:
    """Yield ψ′, as `exact_queries`."""
    pieces = [_query_scores(q, k, part, scale, visible).logsumexp(-1) for part in tiles(q, k.shape[2])]
    lse = torch.cat(pieces, dim=-1).unsqueeze(-2)  # (B, H, 1, Lq)
    for tokens in tiles(k, max(q.shape[2], query_members[0, 0].numel())):
        logarithm = products(k[:, :, tokens], q, scale) - lse  # ln A, (B, H, T, Lq)
        if visible:
            logarithm = logarithm.masked_fill(_numbers(q) < _numbers(k)[tokens, None], -torch.inf)
        # A softmax over the queries: its normaliser is one that ψ′ has anyway, and it cannot underflow. A key that no
        # query sees has none.
        attention = torch.softmax(logarithm, dim=-1).nan_to_num(0.0)
        yield Tile(tokens, unit_sum(_by_bucket(attention, query_members)))


def feature_queries(q: Features, k: Features, key_members: Tensor, *, visible: bool) -> Iterator[Tile]:
    """Yield ψ_i[b] ∝ φ(q_i)·Σ_{j in b} φ(k_j) (Eq. 16) in O(L·N) time. q, k: features of x/D^(1/4)."""
    return (_visible_queries if visible else _all_queries)(q, k, key_members)


def feature_keys(q: Features, k: Features, query_members: Tensor, *, visible: bool) -> Iterator[Tile]:
    """Yield ψ′_j[b] ∝ Σ_{i in b} φ(q_i)/(φ(q_i)·Σ_j′ φ(k_j′)) · φ(k_j) (Eq. 17) in O(L·N) time."""
    return (_visible_keys if visible else _all_keys)(q, k, query_members)


def bucket_sums(x: Tensor, members: Tensor) -> Tensor:
    """Σ_{j in b} x_j of every bucket: (B, H, N, F) from x (B, H, L, F)."""
    index = members.long().flatten(2).unsqueeze(-1).expand(-1, -1, -1, x.shape[3])
    return x.gather(2, index).unflatten(2, members.shape[2:]).sum(3)


def tiles(x: Tensor, width: int, *, pairs: bool = False) -> Iterator[slice]:
    """Cuts x (B, H, L, ...) along L so that (B, H, T, width) numbers make a tile; pairs: (B, H, T, T) numbers too."""
    elements = _CPU_TILE_ELEMENTS if x.device.type == "cpu" else _GPU_TILE_ELEMENTS
    each = elements // max(1, x.shape[0] * x.shape[1])
    step = max(1, min(each // width, math.isqrt(each)) if pairs else each // width)
    for start in range(0, x.shape[2], step):
        yield slice(start, min(start + step, x.shape[2]))


def products(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Return scale·x_i·y_j in fp32 at least: (B, H, Lx, Ly)."""
    return (at_least_fp32(x) * scale) @ at_least_fp32(y).transpose(-1, -2)


def _numbers(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2], device=x.device)


def _query_scores(q: Tensor, k: Tensor, tokens: slice, scale: float, visible: bool) -> Tensor:
    """Return scale·q_i·k_j of a tile of queries, −∞ where not visible: (B, H, T, Lk)."""
    score = products(q[:, :, tokens], k, scale)
    return score.masked_fill(_numbers(k) > _numbers(q)[tokens, None], -torch.inf) if visible else score


def _by_bucket(weights: Tensor, members: Tensor) -> Tensor:
    """Sums weights (B, H, T, L) over the tokens of each bucket: (B, H, T, N)."""
    index = members.long().flatten(2).unsqueeze(2).expand(-1, -1, weights.shape[2], -1)
    return weights.gather(-1, index).unflatten(-1, members.shape[2:]).sum(-1)


@torch.no_grad()
def _all_queries(q: Features, k: Features, members: Tensor) -> Iterator[Tile]:
    highest = k.shift.amax(-2, keepdim=True)
    sums = bucket_sums(k.values * torch.exp(k.shift - highest), members).transpose(-1, -2)
    for tokens in tiles(q.values, members.shape[2]):
        yield Tile(tokens, unit_sum(q.values[:, :, tokens] @ sums))


@torch.no_grad()
def _all_keys(q: Features, k: Features, members: Tensor) -> Iterator[Tile]:
    highest = k.shift.amax(-2, keepdim=True)
    total = (k.values * torch.exp(k.shift - highest)).sum(-2, keepdim=True)
    normaliser = (q.values * total).sum(-1, keepdim=True)  # at any scale of φ(q): it cancels
    weights = torch.where(normaliser > 0, q.values / normaliser, 0.0)
    sums = bucket_sums(weights, members).transpose(-1, -2)
    for tokens in tiles(k.values, members.shape[2]):
        yield Tile(tokens, unit_sum(k.values[:, :, tokens] @ sums))


def _levels(k: Features) -> Tensor:
    """The highest shift at or before each token, (B, H, L, 1): no later token makes earlier sums underflow."""
    return k.shift.cummax(-2).values


def _visible_pairs(q: Tensor, k: Features, level: Tensor, tokens: slice) -> Tensor:
    """Return q_i·φ(k_j)·exp(−level_i) of a tile's pairs j <= i, else 0: (B, H, T, T)."""
    decay = k.shift[:, :, tokens].transpose(-1, -2) - level[:, :, tokens]
    later = torch.ones(decay.shape[-2:], dtype=torch.bool, device=decay.device).triu(1)
    return (q[:, :, tokens] @ k.values[:, :, tokens].transpose(-1, -2)) * decay.masked_fill(later, -torch.inf).exp()


def _members_of(tokens: slice, members: Tensor, like: Tensor) -> Tensor:
    """1 where a token of the tile is in a bucket, else 0: (B, H, T, N), in the dtype of `like`."""
    count = tokens.stop - tokens.start
    place = members.long() - tokens.start
    place = place.masked_fill((place < 0) | (place >= count), count).transpose(-1, -2)  # T for all other tokens
    shape = (*members.shape[:2], count + 1, members.shape[2])
    return torch.zeros(shape, dtype=like.dtype, device=members.device).scatter_(2, place, 1.0)[:, :, :-1]


@torch.no_grad()
def _visible_queries(q: Features, k: Features, members: Tensor) -> Iterator[Tile]:
    """Sums over the tiles before, at the level `before`, and pairs inside the tile."""
    level = _levels(k)
    before = torch.full_like(level[:, :, :1], -torch.inf)
    sums = k.values.new_zeros(*members.shape[:3], k.values.shape[3])
    for tokens in tiles(k.values, members.shape[2], pairs=True):
        member, last = _members_of(tokens, members, k.values), level[:, :, tokens.stop - 1 : tokens.stop]
        utility = (q.values[:, :, tokens] @ sums.transpose(-1, -2)) * torch.exp(before - level[:, :, tokens])
        yield Tile(tokens, unit_sum(utility + _visible_pairs(q.values, k, level, tokens) @ member))
        keys = k.values[:, :, tokens] * torch.exp(k.shift[:, :, tokens] - last)
        sums = sums * torch.exp(before - last) + member.transpose(-1, -2) @ keys
        before = last


@torch.no_grad()
def _visible_keys(q: Features, k: Features, members: Tensor) -> Iterator[Tile]:
    """Yield ψ′, last tile first: sums over later tiles, at the level `after`, and pairs inside the tile."""
    level = _levels(k)
    weights = _visible_weights(q, k, level, members.shape[2])
    after = level[:, :, -1:]
    sums = k.values.new_zeros(*members.shape[:3], k.values.shape[3])
    for tokens in reversed(list(tiles(k.values, members.shape[2], pairs=True))):
        keys, queries, own = k.values[:, :, tokens], weights[:, :, tokens], level[:, :, tokens]
        member, first = _members_of(tokens, members, k.values), own[:, :, :1]
        earlier = torch.ones(own.shape[2], own.shape[2], dtype=torch.bool, device=own.device).tril(-1)
        decay = (own - own.transpose(-1, -2)).masked_fill(earlier, -torch.inf)  # 0 and below: levels only rise
        pairs = (keys @ queries.transpose(-1, -2)) * decay.exp()
        utility = (keys @ sums.transpose(-1, -2)) * torch.exp(own - after)
        yield Tile(tokens, unit_sum(utility + pairs @ member))
        sums = sums * torch.exp(first - after) + member.transpose(-1, -2) @ (queries * torch.exp(first - own))
        after = first


def _visible_weights(q: Features, k: Features, level: Tensor, buckets: int) -> Tensor:
    """Return φ(q_i)/(φ(q_i)·Σ_{j <= i} φ(k_j))·exp(level_i): (B, H, L, F)."""
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
