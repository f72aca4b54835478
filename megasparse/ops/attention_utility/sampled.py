"""Attention utility per bucket from some queries and some keys, in O(S·L) time for S queries.

ψ and ψ′ are those of `blockwise`. C keys are drawn with replacement, key j c_j times in expectation: half of the draws
in proportion to the attention that j gets from the S queries, half evenly. Then Σ_draws f(j)/c_j has the expectation
Σ_j f(j) for every f, and where the attention of a query gathers, draws gather. So the sum over a bucket's keys (LHA Eq.
11) and the sum that a softmax divides by are estimated without bias, and ψ is their ratio.

B batch, H heads, L length, D head dim, N buckets, S sampled queries, C drawn keys, T tokens of a tile.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megasparse.ops.attention_utility.blockwise import Tile, products, tiles
from megasparse.ops.hash_learning import unit_sum

_SHARES = 1 << 40
"""Parts of 1 that a key's probability is counted in: sums of whole numbers are the same in any order."""


class Draws(NamedTuple):
    """Drawn keys. k: (B, H, C, D). tokens: their numbers, (B, H, C), or (C,) for all heads. ln_count: ln c_j of each,
    of the shape of tokens; 0 where every key comes once.
    """

    k: Tensor
    tokens: Tensor
    ln_count: Tensor


class Queries(NamedTuple):
    """Sampled queries. q: (B, H, S, D). tokens: their numbers, (S,)."""

    q: Tensor
    tokens: Tensor


def at_tokens(x: Tensor, tokens: Tensor) -> Tensor:
    """Vectors of x (B, H, L, D) at `tokens` (B, H, C): (B, H, C, D)."""
    return x.gather(2, tokens.unsqueeze(-1).expand(-1, -1, -1, x.shape[3]))


@torch.no_grad()
def draw_keys(queries: Queries, k: Tensor, uniform: Tensor, *, scale: float, visible: bool) -> Draws:
    """Draw C keys of k (B, H, L, D).

    uniform: (C,) numbers in [0, 1), one for each of C equal parts of the probability, so that no key comes less often
    than in expectation by more than two. visible: a query attends to keys at or before it alone.
    """
    share = 0.5 * (_received(queries, k, scale, visible).double() / len(queries.tokens) + 1.0 / k.shape[2])
    parts = (share * _SHARES).long() + 1
    until = parts.cumsum(-1)
    count, total = len(uniform), until[..., -1:]
    place = (torch.arange(count, device=k.device) + uniform.double()) / count * total
    tokens = torch.searchsorted(until, place.long().minimum(total - 1), right=True)
    ln_count = (count * parts.gather(-1, tokens) / total).log().float()
    return Draws(at_tokens(k, tokens), tokens, ln_count)


@torch.no_grad()
def sampled_normalizer(queries: Queries, draws: Draws, *, scale: float, visible: bool) -> Tensor:
    """Return ln of an estimate of Σ_j exp(scale·q_i·k_j) of each query: (B, H, S)."""
    return _logarithms(queries, draws, scale, visible).logsumexp(-1)


@torch.no_grad()
def sampled_queries(queries: Queries, draws: Draws, in_key: Tensor, *, scale: float, visible: bool) -> Iterator[Tile]:
    """Yield ψ of the queries by the drawn keys. in_key: (B, H, C, N), 1 where a drawn key is in a bucket, else 0."""
    attention = _logarithms(queries, draws, scale, visible).softmax(-1).nan_to_num(0.0)  # 0 where none is visible
    yield Tile(slice(0, len(queries.tokens)), unit_sum(attention @ in_key.to(attention.dtype)))


@torch.no_grad()
def sampled_keys(
    queries: Queries, k: Tensor, tokens: Tensor, normalizer: Tensor, in_query: Tensor, *, scale: float, visible: bool
) -> Iterator[Tile]:
    """Yield ψ′ of keys k (B, H, K, D), token numbers `tokens` (K,): before it is normalised its expectation over
    samples of queries is the whole sum, as a part of it.

    normalizer: see `sampled_normalizer`. in_query: (B, H, S, N), 1 where a query is in a bucket, else 0.
    """
    less = normalizer.masked_fill(normalizer.isneginf(), torch.inf).unsqueeze(-2)
    for part in tiles(k, max(in_query.shape[2:])):
        logarithm = products(k[:, :, part], queries.q, scale) - less
        if visible:
            logarithm = logarithm.masked_fill(queries.tokens < tokens[part, None], -torch.inf)
        # A softmax over the queries: its normaliser is one that ψ′ has anyway, and it cannot underflow. A key that no
        # query of the sample sees has none.
        attention = logarithm.softmax(-1).nan_to_num(0.0)
        yield Tile(part, unit_sum(attention @ in_query.to(attention.dtype)))


def _received(queries: Queries, k: Tensor, scale: float, visible: bool) -> Tensor:
    """Σ_i A_ij over the queries, (B, H, L) fp32 at least. It says how often keys are drawn and nothing else, so
    products are in the dtype of q and k.
    """
    keys, total = k.transpose(-1, -2), torch.zeros((), device=k.device)
    for part in tiles(queries.q, k.shape[2]):
        score = (queries.q[:, :, part] * scale) @ keys
        if visible:
            number = torch.arange(k.shape[2], device=k.device)
            score = score.masked_fill(number > queries.tokens[part, None], -torch.inf)
        total = total + score.softmax(-1).sum(-2, dtype=torch.promote_types(k.dtype, torch.float32))
    return total


def _logarithms(queries: Queries, draws: Draws, scale: float, visible: bool) -> Tensor:
    """Return scale·q_i·k_j − ln c_j of queries and drawn keys, −∞ where not visible: (B, H, S, C)."""
    score = products(queries.q, draws.k, scale) - draws.ln_count.unsqueeze(-2)
    return score.masked_fill(draws.tokens.unsqueeze(-2) > queries.tokens[:, None], -torch.inf) if visible else score
