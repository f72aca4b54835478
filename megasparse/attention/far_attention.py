"""Full attention to the keys beyond a mechanism's window and sinks, and losses by which its choice of keys learns it.

A mechanism that chooses keys is judged by what it adds to those that it sees in any case, so it learns from the others
alone. A sample of queries stands for all, so that time and memory grow with the length.

B batch, H heads, L length, S sampled queries, D head dim, d width of a sketch, N buckets, K keys.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megasparse.attention.contract import AttentionInputs
from megasparse.attention.sinks import DocumentRanks
from megasparse.ops.random import random_bits

SAMPLES = 256
"""Queries that a choice of keys learns from at a time."""
TILE = 64
"""Queries whose scores exist at a time, of which only the best stay."""
BEST = 32
"""Keys of each of them that hashes learn to meet."""
Near = Callable[[Tensor, Tensor], Tensor]
"""Predicate `near(query_positions, key_positions) -> bool`, broadcasting."""


def drawn_positions(key: int, length: int, count: int, device: torch.device) -> Tensor:
    """`count` different positions, or all that there are, of every sequence alike: (S,) int64."""
    bits = random_bits(key, torch.arange(length, device=device), 1).squeeze(-1)
    return bits.argsort(stable=True)[:count]


def far_pairs(inputs: AttentionInputs, queries: Tensor, sinks: int, near: Near | None) -> Tensor:
    """Pairs that attention shows, but neither the window nor the sinks: (B or 1, S, L) bool. queries: (S,)."""
    _, number, rank = DocumentRanks.of(inputs)
    length, of_query = rank.shape[1], rank[:, queries, None]
    first = number - rank  # of the document, among all tokens in their order
    visible = (first[:, None] == first[:, queries, None]) & (of_query < length) & (rank < length)[:, None]
    if inputs.causal:
        visible = visible & (rank[:, None] <= of_query)
    if near is not None:
        visible = visible & ~near(number[:, queries, None], number[:, None])
    return visible & (rank >= sinks)[:, None]


@torch.no_grad()
def far_attention(inputs: AttentionInputs, queries: Tensor, far: Tensor, scale: float) -> Tensor:
    """The share of full attention softmax(scale·q·k) of each far pair: (B, H, S, L), in fp32 at least. far: (B or 1, S,
    L) bool.
    """
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (inputs.q[:, :, queries], inputs.k))
    score = (q @ k.transpose(-1, -2)).mul_(scale)
    score.masked_fill_(~far_pairs(inputs, queries, 0, None)[:, None], torch.finfo(score.dtype).min)
    return torch.softmax(score, dim=-1).masked_fill_(~far[:, None], 0.0)


def best_far(
    inputs: AttentionInputs, queries: Tensor, sinks: int, near: Near | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The BEST far keys of each query, or all: their shares of attention and their places, (B, H, S, K) each."""
    tiles = []
    for tile in queries.split(TILE):
        shares = far_attention(inputs, tile, far_pairs(inputs, tile, sinks, near), scale)
        tiles.append(shares.topk(min(BEST, shares.shape[-1]), dim=-1))
    return torch.cat([best.values for best in tiles], dim=2), torch.cat([best.indices for best in tiles], dim=2)


def sketch_divergence(q: Tensor, k: Tensor, share: Tensor, far: Tensor) -> Tensor:
    """Σ_j a_ij·log(a_ij/(m_i·p_ij)), mean over queries: the divergence of the sketch p = softmax(q·k/√d) of far keys
    from their shares a of attention, weighted by their part m_i = Σ_j a_ij (as the indexer of DeepSeek-V3.2 learns).
    Scalar.

    q: (B, S, d). k: (B, L, d). share: (B, S, L), 0 where `far` (B or 1, S, L) is false.
    """
    score = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    log_p = torch.log_softmax(score.masked_fill(~far, torch.finfo(score.dtype).min), dim=-1).masked_fill(~far, 0.0)
    total = share.sum(-1, keepdim=True)
    entropy = torch.xlogy(share, share / total.clamp_min(torch.finfo(share.dtype).tiny))
    return (entropy - share * log_p).sum(-1).mean()


def collision_loss(query_scores: Tensor, key_scores: Tensor, share: Tensor, best_scores: Tensor) -> Tensor:
    """−Σ_i m_i·log(Σ_j a_ij·P_i·P′_j / m_i) / Σ_i m_i: how improbable it is that queries and their best keys, each of
    which draws a bucket by its softmax P or P′, draw the same; plus the divergences of the mean P and P′ of each head
    from even buckets, without which one bucket for all would be best. Mean over heads, scalar.

    query_scores, key_scores: (B, H, S, N), of sampled queries and keys. share: (B, H, S, K), attention a_ij to the best
    keys. best_scores: (B, H, S, K, N), of those.
    """
    chosen, drawn = torch.softmax(query_scores, dim=-1), torch.softmax(key_scores, dim=-1)
    meet = (torch.softmax(best_scores, dim=-1) @ chosen.unsqueeze(-1)).squeeze(-1)
    total = share.sum(-1)
    hit = (share * meet).sum(-1) / total.clamp_min(torch.finfo(total.dtype).tiny)
    missed = -(total * (hit + 1e-4).log()).sum((0, 2)) / total.sum((0, 2)).clamp_min(torch.finfo(total.dtype).tiny)
    mean = torch.stack([chosen, drawn]).mean((1, 3))  # (2, H, N)
    # A softmax may be exactly 0, where the gradient of a logarithm is not finite.
    uneven = (mean * (mean.clamp_min(torch.finfo(mean.dtype).tiny) * mean.shape[-1]).log()).sum(-1)
    return (missed + uneven.sum(0)).mean()
