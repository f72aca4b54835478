"""LHA's hash functions trained alone, on the queries and keys of a model that stays as it is (LHA section 4.2).

B batch, H heads, L length, D head dim, N buckets.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from megasparse.attention.contract import AttentionInputs, RecomputeCache
from megasparse.attention.lha import LHAAttention
from megasparse.attention.lha_hash import Weights, scores_of
from megasparse.attention.observation import Call
from megasparse.config.attention import LHAAttentionConfig
from megasparse.ops.random import RngContext, derive

LEARNING_RATE = 3e-3
Utility = Literal["exact", "sampled", "features"]


def train_hashes(
    steps: Iterable[list[Call]], buckets: int, seed: int, utility: Utility = "exact"
) -> tuple[list[LHAAttention], list[float]]:
    """Train an encoder's LHA in place of every attention of a model, one step of Adam after another: two-layer networks
    H_Q and H_K for N buckets.

    steps: what the model's mechanisms were called with, on text of that step, one step at least. utility: how the
    targets ψ and ψ′ are found (`attention.lha.utility`). Returns the mechanisms in the order of the calls, and the
    divergence KL_Q + KL_K of each step, mean over tokens, heads and calls.
    """
    steps = iter(steps)
    first = next(steps)
    keys = (derive(seed, "hash functions", i) for i in range(len(first)))
    mechanisms = [_fresh(call, buckets, key, utility) for call, key in zip(first, keys, strict=True)]
    return mechanisms, list(training(itertools.chain([first], steps), mechanisms, seed))


def training(steps: Iterable[list[Call]], mechanisms: Sequence[LHAAttention], seed: int) -> Iterator[float]:
    """Trains the hashes of mechanisms that exist, in place, a step of Adam for each of `steps`; see `train_hashes`.

    steps: for each mechanism a call that has its heads, of whatever mechanism. Yields the divergence of each step.
    """
    optimizer = torch.optim.Adam([p for each in mechanisms for p in each.parameters()], lr=LEARNING_RATE)
    for number, calls in enumerate(steps):
        # Each call's functions learn as if they were alone.
        learned = (_learn(each, call, seed, number) for call, each in zip(calls, mechanisms, strict=True))
        loss = torch.stack([divergence for divergence, _ in learned]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield float(loss.detach()) / len(calls)


@torch.no_grad()
def kept_attention(calls: Iterable[Call], mechanisms: Iterable[LHAAttention], seed: int) -> float:
    """The share of full attention that lies between a query and the best members of its bucket, as many of every
    bucket: mean over real tokens, heads and calls, exactly, in O(L²) time, whatever the hashes learn from. What
    training raises; see `training` for `calls`.
    """
    found = []
    for call, each in zip(calls, mechanisms, strict=True):
        own, each.config = each.config, each.config.model_copy(update={"utility": "exact"})
        try:
            found.append(float(_learn(each, call, seed, 0)[1]["attention_utility"]))
        finally:
            each.config = own
    return sum(found) / len(found)


@torch.no_grad()
def hash_scores(mechanism: LHAAttention, call: Call) -> tuple[Tensor, Tensor]:
    """H_Q(q) and H_K(k): (B, H, L, N) each."""
    inputs = _inputs(call)

    def job(query: Weights, key: Weights) -> tuple[Tensor, Tensor]:
        return scores_of((inputs.q,), (query,)), scores_of((inputs.k,), (key,))

    return mechanism.hash(job, inputs.q, call.context)


def _fresh(call: Call, buckets: int, key: int, utility: Utility) -> LHAAttention:
    chunk = -(-call.inputs.q.shape[2] // buckets)
    spec = dataclasses.replace(call.spec, causal=False, max_length=chunk * buckets)
    mechanism = LHAAttention(LHAAttentionConfig(chunk=chunk, utility=utility), spec)
    generator = torch.Generator().manual_seed(key >> 1)
    with torch.no_grad():
        for weight in mechanism.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
    return mechanism.to(call.inputs.q.device)


def _learn(mechanism: LHAAttention, call: Call, seed: int, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """KL_Q + KL_K (Eq. 13), mean over tokens and heads, the mechanism's own loss without its weight; its statistics."""
    rng = RngContext(seed, step, torch.arange(len(call.x)), training=True)
    context = dataclasses.replace(call.context, rng=rng, recompute=RecomputeCache())
    loss, statistics = mechanism.learn(call.x, _inputs(call), context)
    return loss * (mechanism.spec.layers / mechanism.config.weight), statistics


def _inputs(call: Call) -> AttentionInputs:
    """Without a causal mask, as the paper measures, and with q·k/√D the call's own logits."""
    q = call.inputs.q * (call.scale * call.inputs.q.shape[-1] ** 0.5)
    return call.inputs._replace(q=q, causal=False)
