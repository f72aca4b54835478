"""LHA's hash functions trained alone, on the queries and keys of a model that stays as it is (LHA section 4.2).

B batch, H heads, L length, D head dim, N buckets.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megasparse.attention.lha_hash import (
    Example,
    HashFunctions,
    Sides,
    Weights,
    bucket_codes,
    bucket_members,
    divergence,
    scores_of,
)
from megasparse.attention.observation import Call
from megasparse.ops.attention_utility import Tile, exact_keys, exact_queries
from megasparse.ops.random import derive

LEARNING_RATE = 3e-3


def train_hashes(steps: Iterable[list[Call]], buckets: int, seed: int) -> tuple[list[HashFunctions], list[float]]:
    """Train H_Q and H_K, two-layer networks, of every attention of a model, one step of Adam after another.

    steps: what the model's mechanisms were called with, on text of that step. The targets ψ and ψ′ (Eq. 11 and 14) are
    exact, those of a mechanism's own training (see LHAAttention). Returns the functions in the order of the calls, and
    the divergence KL_Q + KL_K of each step, mean over tokens, heads and calls.
    """
    functions: list[HashFunctions] = []
    history = []
    for calls in steps:
        if not functions:
            functions = [_fresh(call, buckets, derive(seed, "hash functions", i)) for i, call in enumerate(calls)]
            optimizer = torch.optim.Adam([p for each in functions for p in each.parameters()], lr=LEARNING_RATE)
        loss = torch.stack([_loss(call, hashes, buckets) for call, hashes in zip(calls, functions, strict=True)]).mean()
        optimizer.zero_grad()
        (loss * len(calls)).backward()  # each call's functions learn as if they were alone
        optimizer.step()
        history.append(float(loss.detach()))
    return functions, history


@torch.no_grad()
def hash_scores(functions: HashFunctions, call: Call) -> tuple[Tensor, Tensor]:
    """H_Q(q) and H_K(k): (B, H, L, N) each."""
    q, k = call.heads.q, call.heads.k
    return functions(lambda query, key: (scores_of((q,), (query,)), scores_of((k,), (key,))), q, call.context)


def _fresh(call: Call, buckets: int, key: int) -> HashFunctions:
    functions = HashFunctions("mlp", call.place, buckets)
    generator = torch.Generator().manual_seed(key >> 1)
    with torch.no_grad():
        for weight in functions.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
    return functions.to(call.heads.q.device)


def _loss(call: Call, functions: HashFunctions, buckets: int) -> Tensor:
    """KL_Q + KL_K (Eq. 13), mean over tokens and heads."""
    q, k, scale = call.heads.q, call.heads.k, call.scale

    def job(query: Weights, key: Weights) -> Tensor:
        queries, keys = Sides((q,), (query,)), Sides((k,), (key,))
        with torch.no_grad():
            size = math.floor(math.sqrt(2) * q.shape[2] / buckets)
            of_query, of_key = (bucket_members(side, buckets, size) for side in (queries, keys))
        utilities = (
            exact_queries(q, k, of_key, scale=scale, visible=False),
            exact_keys(q, k, of_query, scale=scale, visible=False),
        )
        losses = [
            divergence(_examples(side, tiles, buckets), side.weights)[0]
            for side, tiles in zip((queries, keys), utilities, strict=True)
        ]
        return losses[0] + losses[1]

    return functions(job, q, call.context) / q[..., 0].numel()


def _examples(side: Sides, tiles: Iterator[Tile], buckets: int) -> Iterator[Example]:
    (x,), codes = side.inputs, bucket_codes(side, buckets)
    for tokens, utility in tiles:
        yield Example((x[:, :, tokens],), utility, codes[:, :, tokens])
