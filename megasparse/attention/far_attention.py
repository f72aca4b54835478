"""Full attention to keys beyond a mechanism's window and sinks, and losses that train a choice of keys with it.

Keys in the window and sinks are visible in any case. A sample of queries keeps time and memory linear in the length.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megasparse.attention.contract import AttentionInputs
from megasparse.attention.sinks import DocumentRanks
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.random import Key, random_bits

SAMPLES = 256
"""Sampled queries per step."""
TILE = 64
"""Queries whose scores are stored at a time."""
BEST = 32
"""Best keys per query that hashes learn to match."""
InWindow = Callable[[Tensor, Tensor], Tensor]
"""Predicate `in_window(query_positions, key_positions) -> bool`, broadcasting."""


def drawn_positions(key: Key, length: int, count: int, device: torch.device) -> Tensor:
    """Draw `count` distinct positions (or all), the same for every sequence: (S,) int64."""
    bits = random_bits(key, torch.arange(length, device=device), 1).squeeze(-1)
    return bits.argsort(stable=True)[:count]


def far_pairs(inputs: AttentionInputs, queries: Tensor, sinks: int, in_window: InWindow | None) -> Tensor:
    """Return the visible pairs that are neither in the window nor with a sink: (B or 1, S, L) bool. queries: (S,)."""
    _, number, rank = DocumentRanks.of(inputs)
    length = rank.shape[1]
    of_query = rank[:, queries, None]
    first = number - rank  # index of the document's first token in `DocumentRanks.order`
    visible = (first[:, None] == first[:, queries, None]) & (of_query < length) & (rank < length)[:, None]
    if inputs.causal:
        visible = visible & (rank[:, None] <= of_query)
    if in_window is not None:
        visible = visible & ~in_window(number[:, queries, None], number[:, None])
    return visible & (rank >= sinks)[:, None]


@torch.no_grad()
def far_attention(inputs: AttentionInputs, queries: Tensor, far: Tensor, scale: float) -> Tensor:
    """Return the probability of each far pair (B or 1, S, L) in full attention softmax(scale·q·k): (B, H, S, L)."""
    q, k = (at_least_fp32(x) for x in (inputs.q[:, :, queries], inputs.k))
    score = (q @ k.transpose(-1, -2)).mul_(scale)  # (B, H, S, L)
    score.masked_fill_(~far_pairs(inputs, queries, 0, None)[:, None], torch.finfo(score.dtype).min)
    return torch.softmax(score, dim=-1).masked_fill_(~far[:, None], 0.0)


def best_far(
    inputs: AttentionInputs, queries: Tensor, sinks: int, in_window: InWindow | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return each query's BEST far keys (or all): attention probabilities and positions, (B, H, S, K) each."""
    tiles = []
    for tile in queries.split(TILE):
        shares = far_attention(inputs, tile, far_pairs(inputs, tile, sinks, in_window), scale)
        tiles.append(shares.topk(min(BEST, shares.shape[-1]), dim=-1))
    return torch.cat([best.values for best in tiles], dim=2), torch.cat([best.indices for best in tiles], dim=2)


def token_mean(x: Tensor, real: Tensor | None) -> Tensor:
    """Average x (B, H, L, N) over the tokens of all sequences, only those in `real` (B, L): (H, N)."""
    if real is None:
        return x.mean((0, 2))
    return x.where(real[:, None, :, None], 0.0).sum((0, 2)) / real.sum().clamp_min(1)


def sketch_divergence(q: Tensor, k: Tensor, share: Tensor, far: Tensor, real: Tensor | None) -> Tensor:
    """Return Σ_j a_ij·log(a_ij/(m_i·p_ij)), averaged over real queries: the divergence of a sketch p = softmax(q·k/√d)
    of far keys from their attention a, weighted by its total m_i = Σ_j a_ij (as DeepSeek-V3.2's indexer).

    q: (B, S, d). k: (B, L, d). share: (B, S, L), 0 where `far` (B or 1, S, L) is false. real: (B, S) or None.
    """
    score = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5  # (B, S, L)
    log_p = torch.log_softmax(score.masked_fill(~far, torch.finfo(score.dtype).min), dim=-1).masked_fill(~far, 0.0)
    total = share.sum(-1, keepdim=True)  # (B, S, 1)
    entropy = torch.xlogy(share, share / total.clamp_min(torch.finfo(share.dtype).tiny))
    return token_mean((entropy - share * log_p).sum(-1)[:, None, :, None], real).squeeze()


def collision_loss(
    query_scores: Tensor, key_scores: Tensor, share: Tensor, best_scores: Tensor, real: Tensor | None
) -> Tensor:
    """Return −Σ_i m_i·log(Σ_j a_ij·P_i·P′_j / m_i) / Σ_i m_i, the negative log probability that a query and its best
    keys draw the same bucket from their softmaxes P and P′; plus, for each head, the divergence of the mean P and P′
    from the uniform distribution. Mean over heads, scalar.

    query_scores, key_scores: (B, H, S, N), of sampled queries and keys. share: (B, H, S, K), attention a_ij to the best
    keys. best_scores: (B, H, S, K, N), scores of these keys. real: (B, S) bool, or None.
    """
    chosen = torch.softmax(query_scores, dim=-1)
    drawn = torch.softmax(key_scores, dim=-1)
    match = (torch.softmax(best_scores, dim=-1) @ chosen.unsqueeze(-1)).squeeze(-1)
    total = share.sum(-1)
    hit = (share * match).sum(-1) / total.clamp_min(torch.finfo(total.dtype).tiny)
    missed = -(total * (hit + 1e-4).log()).sum((0, 2)) / total.sum((0, 2)).clamp_min(torch.finfo(total.dtype).tiny)
    return (missed + (imbalance(chosen, real) + imbalance(drawn, real))).mean()


def imbalance(buckets: Tensor, real: Tensor | None) -> Tensor:
    """Return the divergence of the mean of softmaxes (B, H, L, N) over tokens from the uniform distribution: (H,)."""
    mean = token_mean(buckets, real)
    # Clamp: a softmax can be exactly 0, and the gradient of log is infinite there.
    return (mean * (mean.clamp_min(torch.finfo(mean.dtype).tiny) * mean.shape[-1]).log()).sum(-1)
