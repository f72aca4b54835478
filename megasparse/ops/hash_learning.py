"""Targets for training LHA's hash functions: attention utility per bucket, estimated from a sample, and the divergence.

ψ_i[b] ∝ Σ_{j in b} A_ij is the share of query i's attention to the keys of bucket b (LHA Eq. 11), ψ′_j[b] ∝ Σ_{i in b}
A_ij the share of key j's received attention from the queries of bucket b (Eq. 14); A = softmax(qkᵀ/√D) over all pairs,
even with a causal mask (as in the paper). A sequence is one document without padding.

C keys are drawn with replacement, key j with expected count c_j: half of the draws in proportion to the attention that
j receives from the S sampled queries, half uniformly. Σ_draws f(j)/c_j is an unbiased estimate of Σ_j f(j), used for
the sum over a bucket's keys and the normaliser of the softmax, in O(S·L) time; ψ is their ratio.

N buckets, S sampled queries, C drawn keys, T tokens of a tile.
"""

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from megasparse.ops.operator import at_least_fp32, operator, wide_dtype

_WIDEST = 8192
"""Largest number of buckets for one GPU program."""
_CPU_TILE_ELEMENTS = 1 << 19  # tokens × buckets per tile: 2 MB of fp32
_GPU_TILE_ELEMENTS = 1 << 25
_SHARES = 1 << 40
"""Resolution of key probabilities as integers, whose sums do not depend on the order."""


class Draws(NamedTuple):
    """Drawn keys. k: (B, H, C, D). tokens: token numbers, (B, H, C), or (C,) for all heads. ln_count: ln c_j, in the
    shape of tokens; 0 if every key is drawn once.
    """

    k: Tensor
    tokens: Tensor
    ln_count: Tensor


def tiles(x: Tensor, width: int) -> Iterator[slice]:
    """Split x (B, H, L, ...) along L into tiles of about (B, H, T, width) numbers."""
    elements = _CPU_TILE_ELEMENTS if x.device.type == "cpu" else _GPU_TILE_ELEMENTS
    step = max(1, elements // max(1, x.shape[0] * x.shape[1]) // width)
    for start in range(0, x.shape[2], step):
        yield slice(start, min(start + step, x.shape[2]))


def at_tokens(x: Tensor, tokens: Tensor) -> Tensor:
    """Return the vectors of x (B, H, L, D) at `tokens` (B, H, C): (B, H, C, D)."""
    return x.gather(2, tokens.unsqueeze(-1).expand(-1, -1, -1, x.shape[3]))


@torch.no_grad()
def draw_keys(q: Tensor, k: Tensor, points: Tensor, *, scale: float) -> Draws:
    """Draw C keys of k (B, H, L, D) for sampled queries q (B, H, S, D).

    points: (C,) fp64, a random point of each of C equal parts of [0, 1), the cumulative probability of keys.
    """
    keys = k.transpose(-1, -2)  # (B, H, D, L)
    scaled = q * scale
    scores = (scaled[:, :, part] @ keys for part in tiles(q, k.shape[2]))  # precise enough for drawing keys
    shares = (score.softmax(-1).sum(-2, dtype=wide_dtype(k)) for score in scores)
    received = reduce(torch.add, shares)  # Σ_i A_ij, (B, H, L)
    uniform = torch.full((1,), 0.5 * _SHARES / k.shape[2], dtype=torch.float64, device=k.device)
    parts = uniform.add(received, alpha=0.5 * _SHARES / q.shape[2]).long() + 1
    ends = parts.cumsum(-1)
    total = ends[..., -1:]
    tokens = torch.searchsorted(ends, (points * total).long(), right=True).clamp_max_(k.shape[2] - 1)  # even with NaN
    ln_count = (len(points) * parts.gather(-1, tokens) / total).log().float()
    return Draws(at_tokens(k, tokens), tokens, ln_count)


@torch.no_grad()
def sampled_queries(
    q: Tensor, draws: Draws, in_key: Tensor, *, scale: float, features: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ψ of the queries, estimated from the drawn keys, (B, H, S, N), 0 after underflow; and the log of an
    estimate of Σ_j exp(scale·q_i·k_j) for each query, (B, H, S).

    in_key: (B, H, C, N), 1 if the drawn key is in the bucket. features: see `_products`.
    """
    logarithm = _products(q, draws.k, scale, features) - draws.ln_count.unsqueeze(-2)  # −ln c_j, (B, H, S, C)
    attention = logarithm.softmax(-1)
    return unit_sum(attention @ in_key.to(attention.dtype)), logarithm.logsumexp(-1)


@torch.no_grad()
def sampled_keys(
    q: Tensor, k: Tensor, normalizer: Tensor, in_query: Tensor, *, scale: float, features: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield ψ′ of keys k (B, H, K, D), tile by tile: (B, H, T, N).

    normalizer: see `sampled_queries`. in_query: (B, H, S, N), 1 if the query is in the bucket.
    """
    for part in tiles(k, max(in_query.shape[2:])):
        logarithm = _products(k[:, :, part], q, scale, features) - normalizer.unsqueeze(-2)
        # A softmax over the queries cannot underflow, and ψ′ is normalised anyway.
        attention = logarithm.softmax(-1)
        yield part, unit_sum(attention @ in_query.to(attention.dtype))


def _products(x: Tensor, y: Tensor, scale: float, features: Tensor | None) -> Tensor:
    """Return scale·x_i·y_j, (B, H, Lx, Ly). features: (H, F, D), rows ω: return ln φ(x_i)·φ(y_j) instead, its estimate
    by positive random features φ(x) = exp(√scale·ωx − scale·|x|²/2)/√F (LHA Eq. 15).
    """
    x, y = at_least_fp32(x), at_least_fp32(y)
    if features is None:
        return (x * scale) @ y.transpose(-1, -2)
    halves = [scale**0.5 * z @ features.to(z).mT - scale / 2 * z.square().sum(-1, keepdim=True) for z in (x, y)]
    of_x, of_y = (half.amax(-1, keepdim=True) for half in halves)
    product = (halves[0] - of_x).exp() @ (halves[1] - of_y).exp().mT / features.shape[1]
    return product.clamp_min(torch.finfo(product.dtype).tiny).log() + of_x + of_y.mT


_on_rows = operator(dtypes=(torch.float32,), largest_width=_WIDEST, differentiable=False)


@_on_rows
def unit_sum(utility: Tensor) -> Tensor:
    """Divide rows of utility (B, H, T, N) by their sums; a row with sum 0 gives 0. May overwrite utility."""
    total = utility.sum(-1, keepdim=True)
    return torch.where(total > 0, utility / total, 0.0)


@_on_rows
def ranks(scores: Tensor, first: int) -> Tensor:
    """Return ranks of tokens in every bucket, (B, H, N, T) int64: ascending by decreasing softmax(scores) over a
    token's buckets, then by token number, the low 32 bits. scores: (B, H, T, N) from number `first` on.
    """
    # Bits of positive floats have the same order as the floats.
    penalty = -scores.log_softmax(-1).float().transpose(-1, -2)  # (B, H, N, T)
    rank = penalty.abs().contiguous().view(torch.int32).long() << 32
    return rank + torch.arange(first, first + scores.shape[2], device=rank.device)


@_on_rows
def divergence(
    scores: Tensor, utility: Tensor, codes: Tensor, weight: float, learn: bool
) -> tuple[Tensor, Tensor | None]:
    """Return (3,): weight·Σ KL(ψ ‖ softmax(scores)) (LHA Eq. 13), weight·Σ ψ[code] and weight·Σ ψ·ln ψ; and, if
    `learn`, the gradient of the first with respect to the scores, weight·(softmax(scores)·Σψ − ψ), else None.

    scores, utility ψ: (B, H, T, N); scores may be overwritten. codes: (B, H, T), a bucket per token.
    """
    logarithm = scores.log_softmax(-1)
    information = torch.xlogy(utility, utility)
    total = (information - utility * logarithm).sum()
    matched = utility.gather(-1, codes.long().unsqueeze(-1)).sum()
    error = weight * (logarithm.exp_() * utility.sum(-1, keepdim=True) - utility) if learn else None
    return weight * torch.stack([total, matched, information.sum()]), error
