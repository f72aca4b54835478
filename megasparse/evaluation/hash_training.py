"""LHA's hash functions trained alone, on the queries and keys of a model that stays as it is (LHA section 4.2).

B batch, H heads, L length, D head dim, N buckets.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megasparse.attention.assignment import balanced
from megasparse.attention.lha_hash import Example, HashFunctions, Weights, divergence
from megasparse.attention.lha_hash import _scores as scores
from megasparse.attention.observation import Call
from megasparse.ops.attention_utility import Tile, exact_keys, exact_queries
from megasparse.ops.random import derive

LEARNING_RATE = 3e-3


def train_hashes(steps: Iterable[list[Call]], buckets: int, seed: int) -> tuple[list[HashFunctions], list[float]]:
    """Train H_Q and H_K, two-layer networks, of every attention of a model, one step of Adam after another.

    steps: what the model's mechanisms were called with, on text of that step. The targets ψ and ψ′ (Eq. 11 and 14) are
    exact, and their buckets hold equally many tokens each: by the buckets of the plain argmax, all tokens in one bucket
    would be a perfect solution, and training soon finds it. Returns the functions in the order of the calls, and the
    divergence KL_Q + KL_K of each step, mean over tokens, heads and calls.
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
    return functions(lambda query, key: (scores((q,), (query,)), scores((k,), (key,))), q, call.context)


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
        with torch.no_grad():
            query_codes, key_codes = balanced(scores((q,), (query,))), balanced(scores((k,), (key,)))
        of_queries = exact_queries(q, k, key_codes, buckets, scale=scale, visible=False)
        of_keys = exact_keys(q, k, query_codes, buckets, scale=scale, visible=False)
        losses = [
            divergence(_examples(x, tiles, codes), (weights,))[0]
            for x, tiles, codes, weights in ((q, of_queries, query_codes, query), (k, of_keys, key_codes, key))
        ]
        return losses[0] + losses[1]

    return functions(job, q, call.context) / q[..., 0].numel()


def _examples(x: Tensor, tiles: Iterator[Tile], codes: Tensor) -> Iterator[Example]:
    for tokens, utility in tiles:
        yield Example((x[:, :, tokens],), utility, codes[:, :, tokens])
