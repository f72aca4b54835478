"""What LHA's hash functions learn from a sample of a document's queries and keys: `attention.lha.utility` = sampled.

It takes O(S·L + U·N) time and memory. A bucket's best members, which only the scores of all tokens would show, are the
tokens whose score is above a threshold, which U tokens give.

B batch, H heads, L length, D head dim, N buckets, S sampled queries, C sampled keys, U tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megasparse.attention.costs import Passes, Workload, product
from megasparse.attention.far_attention import drawn_positions
from megasparse.attention.lha_hash import Example, Sides, in_buckets, thresholds
from megasparse.config.attention import LHAAttentionConfig
from megasparse.ops.attention_utility import (
    Draws,
    Queries,
    at_tokens,
    draw_keys,
    sampled_keys,
    sampled_normalizer,
    sampled_queries,
)
from megasparse.ops.blocks import at_most
from megasparse.ops.keys import Halves, Key
from megasparse.ops.random import random_bits

_TOKENS_A_BUCKET = 4
"""U, in buckets, where that is more than C."""
Hashes = Callable[[Tensor, Tensor], tuple[Sides, Sides]]
"""What hashes queries, and what hashes keys, of q and k (B, H, ..., D); one and the same of the joint hash."""


@dataclass(frozen=True)
class SampleRule:
    """S sampled queries and C sampled keys of a document; whether the utility counts visible keys alone; how many
    buckets there are, and how many members each has.
    """

    queries: int
    keys: int
    visible: bool
    buckets: int
    size: int


@dataclass(frozen=True)
class Sample:
    """Tokens of a document that its hash functions learn from in one step, drawn evenly without replacement.

    tokens: (U,) their numbers, of which the first S learn as queries and the first C as keys. q, k: (B, H, U, D) of
    them. draws: the keys by which queries learn; drawn_q: the queries of the same tokens, (B, H, C, D). normalizer: (B,
    H, S). bars: of the queries' and of the keys' hash, what a member of each bucket scores at least, (B, H, N).
    """

    length: int
    visible: bool
    tokens: Tensor
    q: Tensor
    k: Tensor
    queries: Queries
    keys: int
    draws: Draws
    drawn_q: Tensor
    normalizer: Tensor
    bars: tuple[Tensor, Tensor]

    @staticmethod
    @torch.no_grad()
    def draw(
        q: Tensor, k: Tensor, hashes: Hashes, rule: SampleRule, keys: tuple[Key | Halves, Key | Halves]
    ) -> "Sample":
        """Draw the sample of a document's queries and keys (B, H, L, D), the same token numbers in every head and
        sequence, but for the draws. keys: of the tokens and of the draws.
        """
        # A sample is a block to planning: a pass over a part of the length has that part of its keys.
        length, count, visible = q.shape[2], at_most(rule.keys), rule.visible
        most = max(count, rule.queries, at_most(_TOKENS_A_BUCKET * rule.buckets))
        tokens = drawn_positions(keys[0], length, most, q.device)
        some_q, some_k = q.index_select(2, tokens), k.index_select(2, tokens)
        queries = Queries(some_q[:, :, : rule.queries], tokens[: rule.queries])
        scoring = {"scale": q.shape[-1] ** -0.5, "visible": visible}
        if length <= count:
            every = torch.zeros(length, device=q.device)
            draws, drawn_q = Draws(some_k, tokens, every), some_q
        else:
            places = torch.arange(count, device=q.device)
            bits = random_bits(keys[1], places, 1).squeeze(-1)
            draws = draw_keys(queries, k, (bits.double() + 2.0**31) / 2.0**32, **scoring)
            drawn_q = at_tokens(q, draws.tokens)
        normalizer = sampled_normalizer(queries, draws, **scoring)
        size = max(1, round(rule.size * len(tokens) / length))
        sides = hashes(some_q, some_k)
        of_queries = thresholds(sides[0], rule.buckets, size)
        bars = of_queries, of_queries if sides[1] is sides[0] else thresholds(sides[1], rule.buckets, size)
        return Sample(
            length, visible, tokens, some_q, some_k, queries, min(count, length), draws, drawn_q, normalizer, bars
        )

    def of_queries(self, hashes: Hashes, codes: Tensor) -> Iterator[Example]:
        """Yield what queries learn. codes: (B, H, L), the buckets of the document's queries."""
        inside = in_buckets(hashes(self.drawn_q, self.draws.k)[1], self.bars[1])
        found = sampled_queries(self.queries, self.draws, inside, scale=self.scale, visible=self.visible)
        own = hashes(self.q, self.k)[0]
        for part, utility in found:
            yield self._example(part, utility, own, codes, len(self.queries.tokens))

    def of_keys(self, hashes: Hashes, codes: Tensor) -> Iterator[Example]:
        """Yield what keys learn. codes: those of the keys."""
        count = len(self.queries.tokens)
        inside = in_buckets(hashes(self.q[:, :, :count], self.k[:, :, :count])[0], self.bars[0])
        keys, tokens = self.k[:, :, : self.keys], self.tokens[: self.keys]
        found = sampled_keys(
            self.queries, keys, tokens, self.normalizer, inside, scale=self.scale, visible=self.visible
        )
        own = hashes(self.q, self.k)[1]
        for part, utility in found:
            yield self._example(part, utility, own, codes, self.keys)

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def _example(self, part: slice, utility: Tensor, own: Sides, codes: Tensor, count: int) -> Example:
        inputs = tuple(x[:, :, part] for x in own.inputs)
        return Example(inputs, utility, codes.index_select(2, self.tokens[part]), self.length / count)


def sample_flops(work: Workload, config: LHAAttentionConfig, buckets: int, weights: int, joint: bool) -> Passes:
    """FLOPs of a head's sample, by token of the document. weights: those of one hash function.

    Hash functions (both for each token of a `joint` hash) of S queries and C keys, with gradients, and of those
    that the other side learns by; both of the U tokens of the thresholds. Scores of S queries and all keys; of S
    queries and C keys, three times; their attention's sums over N buckets for both sides.
    """
    queries, keys = min(config.samples, work.length), min(config.sampled_keys, work.length)
    known = min(work.length, max(keys, queries, _TOKENS_A_BUCKET * buckets))
    hashed = 2.0 * weights * (1 + joint) * (queries + keys)
    pairs = queries * keys * (3 * 2.0 * work.head_dim + 2 * 2.0 * buckets)
    received = queries * work.length * 2.0 * work.head_dim if keys < work.length else 0.0
    forward = Passes(hashed + 2.0 * weights * 2 * known + pairs + received)
    return (product(hashed) + forward) * (1 / work.length)
