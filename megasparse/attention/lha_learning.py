"""The loss of LHA's hash functions: the divergence of their buckets from the attention utility of a sample (Eq. 13).

It takes O(S·L + U·N) time and memory. A bucket's best members, which only the scores of all tokens would show, are the
tokens whose score is above a threshold, which U tokens give.

B batch, H heads, L length, D head dim, N buckets, S sampled queries, C sampled keys, U tokens.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megasparse.attention.costs import Passes, Workload, product
from megasparse.attention.documents import documents
from megasparse.attention.far_attention import drawn_positions
from megasparse.attention.lha_hash import HashInputs, Weights, hash_inputs, in_buckets, scores_of, thresholds
from megasparse.ops import hash_learning
from megasparse.ops.hash_learning import Draws
from megasparse.ops.random import random_bits

_TOKENS_A_BUCKET = 4
"""U, in buckets, where that is more than C."""


@dataclass(frozen=True)
class HashLossConfig:
    """Numbers of the loss. joint: one hash, H_Q(q) + H_K(k), for both sides. buckets, size: how many buckets there are,
    and how many members each has. queries, keys: S and C of a document. token_key, draw_key: those of the draws of
    tokens and of keys.
    """

    joint: bool
    buckets: int
    size: int
    queries: int
    keys: int
    token_key: int
    draw_key: int


class Example(NamedTuple):
    """A tile of tokens, as in `HashInputs.inputs`, the utilities (B, H, T, N) that their hash has to predict, their
    buckets (B, H, T), and how many tokens each of them stands for.
    """

    inputs: tuple[Tensor, ...]
    utility: Tensor
    codes: Tensor
    weight: float = 1.0


def sampled_divergences(
    q: Tensor, k: Tensor, codes: tuple[Tensor, Tensor], masks: tuple[Tensor | None, Tensor | None],
    weights: tuple[Weights, Weights], config: HashLossConfig,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `divergence` of what H_Q learns and of what H_K learns, from a sample of each document: (3,) each.

    q, k: (B, H, L, D), without gradient. codes: their buckets (B, H, L). masks: key_mask and segments, as in
    AttentionInputs.
    """
    of_queries, of_keys = [], []
    for document in documents(*masks):
        sample = Sample.draw(document.take(q), document.take(k), weights, config)
        of_queries.append(sample.of_queries(document.take(codes[0])))
        of_keys.append(sample.of_keys(document.take(codes[1])))
    sides = hash_inputs(q, k, config.joint, weights)
    return (
        divergence(chain.from_iterable(of_queries), sides[0].weights),
        divergence(chain.from_iterable(of_keys), sides[1].weights),
    )


@dataclass(frozen=True)
class Sample:
    """Tokens of a document that its hash functions learn from in one step, drawn evenly without replacement.

    tokens: (U,) their numbers, of which the first S learn as queries and the first C as keys. q, k: (B, H, U, D) of
    them. draws: the keys by which queries learn; drawn_q: the queries of the same tokens, (B, H, C, D). normalizer: (B,
    H, S). bars: of the queries' and of the keys' hash, what a member of each bucket scores at least, (B, H, N).
    """

    length: int
    tokens: Tensor
    q: Tensor
    k: Tensor
    queries: int
    keys: int
    draws: Draws
    drawn_q: Tensor
    normalizer: Tensor
    bars: tuple[Tensor, Tensor]
    weights: tuple[Weights, Weights]
    joint: bool

    @staticmethod
    @torch.no_grad()
    def draw(q: Tensor, k: Tensor, weights: tuple[Weights, Weights], config: HashLossConfig) -> "Sample":
        """Draw the sample of a document's queries and keys (B, H, L, D), the same token numbers in every head and
        sequence, but for the draws.
        """
        length, count, scale = q.shape[2], config.keys, q.shape[-1] ** -0.5
        most = max(count, config.queries, _TOKENS_A_BUCKET * config.buckets)
        tokens = drawn_positions(config.token_key, length, most, q.device)
        some_q, some_k = q.index_select(2, tokens), k.index_select(2, tokens)
        queries = some_q[:, :, : config.queries]
        if length <= count:
            draws, drawn_q = Draws(some_k, tokens, torch.zeros(length, device=q.device)), some_q
        else:
            bits = random_bits(config.draw_key, torch.arange(count, device=q.device), 1).squeeze(-1)
            draws = hash_learning.draw_keys(queries, k, (bits.double() + 2.0**31) / 2.0**32, scale=scale)
            drawn_q = hash_learning.at_tokens(q, draws.tokens)
        normalizer = hash_learning.sampled_normalizer(queries, draws, scale=scale)
        size = max(1, round(config.size * len(tokens) / length))
        sides = hash_inputs(some_q, some_k, config.joint, weights)
        of_queries = thresholds(sides[0], config.buckets, size)
        bars = of_queries, of_queries if config.joint else thresholds(sides[1], config.buckets, size)
        return Sample(
            length, tokens, some_q, some_k, queries.shape[2], min(count, length), draws, drawn_q, normalizer, bars,
            weights, config.joint,
        )  # fmt: skip

    def of_queries(self, codes: Tensor) -> Iterator[Example]:
        """Yield what queries learn. codes: (B, H, L), the buckets of the document's queries."""
        drawn = hash_inputs(self.drawn_q, self.draws.k, self.joint, self.weights)[1]
        inside, queries = in_buckets(drawn, self.bars[1]), self.q[:, :, : self.queries]
        utility = hash_learning.sampled_queries(queries, self.draws, inside, scale=self.scale)
        hashed = hash_inputs(self.q, self.k, self.joint, self.weights)[0]
        yield self._example(slice(0, self.queries), utility, hashed, codes, self.queries)

    def of_keys(self, codes: Tensor) -> Iterator[Example]:
        """Yield what keys learn. codes: those of the keys."""
        queries, keys = self.q[:, :, : self.queries], self.k[:, :, : self.keys]
        sampled = hash_inputs(queries, self.k[:, :, : self.queries], self.joint, self.weights)[0]
        inside = in_buckets(sampled, self.bars[0])
        hashed = hash_inputs(self.q, self.k, self.joint, self.weights)[1]
        for part, utility in hash_learning.sampled_keys(queries, keys, self.normalizer, inside, scale=self.scale):
            yield self._example(part, utility, hashed, codes, self.keys)

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def _example(self, part: slice, utility: Tensor, hashed: HashInputs, codes: Tensor, count: int) -> Example:
        inputs = tuple(x[:, :, part] for x in hashed.inputs)
        return Example(inputs, utility, codes.index_select(2, self.tokens[part]), self.length / count)


def divergence(examples: Iterable[Example], weights: tuple[Weights, ...]) -> Tensor:
    """Return Σ KL(ψ ‖ softmax(H)) over all examples' tokens and heads (Eq. 13); Σ ψ[bucket], the utility of their
    buckets; and Σ ψ·ln ψ, the negative entropy of their utilities (Figure 4): (3,).

    A token whose ψ is 0 adds nothing. Only the first has a gradient, that of the weights.
    """
    flat = [w for side in weights for w in side]
    learn = torch.is_grad_enabled() and any(w.requires_grad for w in flat)
    sums: Tensor = _Divergence.apply(examples, len(weights), learn, *flat)
    return sums


class _Divergence(torch.autograd.Function):
    """The gradient is made with the loss, tile by tile: neither scores nor targets are kept, or made twice."""

    @staticmethod
    def forward(ctx: Any, examples: Iterable[Example], sides: int, learn: bool, *weights: Tensor) -> Tensor:
        wide = [w.detach().to(torch.promote_types(w.dtype, torch.float32)).requires_grad_(learn) for w in weights]
        count = len(wide) // sides
        grouped = [tuple(wide[i * count : (i + 1) * count]) for i in range(sides)]
        sums = torch.zeros(3, dtype=torch.float64, device=weights[0].device)
        grads = [torch.zeros_like(w, requires_grad=False) for w in wide]
        for inputs, utility, codes, weight in examples:
            with torch.set_grad_enabled(learn):
                scores = scores_of(inputs, grouped)
            *parts, error = hash_learning.divergence(scores.detach(), utility, codes, weight, learn)
            for number, part in enumerate(parts):
                sums[number] += part
            if error is not None:
                for total, grad in zip(grads, torch.autograd.grad(scores, wide, error.to(scores.dtype)), strict=True):
                    total += grad
        ctx.save_for_backward(*grads)
        ctx.dtypes = [w.dtype for w in weights]
        return sums.to(wide[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grads = [(grad_outputs[0][0] * g).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return None, None, None, *grads


def sample_flops(work: Workload, queries: int, keys: int, buckets: int, weights: int, joint: bool) -> Passes:
    """Return the FLOPs of a head's sample, by token of the document. weights: those of one hash function.

    Hash functions (both for each token of a `joint` hash) of S queries and C keys, with gradients, and of those
    that the other side learns by; both of the U tokens of the thresholds. Scores of S queries and all keys; of S
    queries and C keys, three times; their attention's sums over N buckets for both sides.
    """
    queries, keys = min(queries, work.length), min(keys, work.length)
    known = min(work.length, max(keys, queries, _TOKENS_A_BUCKET * buckets))
    hashed = 2.0 * weights * (1 + joint) * (queries + keys)
    pairs = queries * keys * (3 * 2.0 * work.head_dim + 2 * 2.0 * buckets)
    received = queries * work.length * 2.0 * work.head_dim if keys < work.length else 0.0
    forward = Passes(hashed + 2.0 * weights * 2 * known + pairs + received)
    return (product(hashed) + forward) * (1 / work.length)
