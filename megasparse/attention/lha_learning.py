"""What LHA's hash functions learn: the attention utility of every bucket, whole, by random features, or of a sample.

A sample (`attention.lha.utility` = sampled) takes O(S·L + U·N) time and memory. A bucket's best members, which only the
scores of all tokens would show, are then the tokens whose score is above a threshold, which U tokens give.

B batch, H heads, L length, D head dim, N buckets, F random features, S sampled queries, C sampled keys, U tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megasparse.attention.costs import Passes, Workload, product
from megasparse.attention.documents import Document, documents
from megasparse.attention.far_attention import drawn_positions
from megasparse.attention.lha_hash import Example, Sides, Weights, bucket_members, divergence, in_buckets, thresholds
from megasparse.ops.attention_utility import (
    Draws,
    Features,
    Queries,
    at_tokens,
    draw_keys,
    exact_keys,
    exact_queries,
    feature_keys,
    feature_queries,
    sampled_keys,
    sampled_normalizer,
    sampled_queries,
)
from megasparse.ops.linear_attention import positive_features
from megasparse.ops.random import random_bits

if TYPE_CHECKING:
    from megasparse.attention.lha import LHAAttentionConfig

_TOKENS_A_BUCKET = 4
"""U, in buckets, where that is more than C."""
Hashes = Callable[[Tensor, Tensor], tuple[Sides, Sides]]
"""What hashes queries, and what hashes keys, of q and k (B, H, ..., D); one and the same of the joint hash."""
Examples = tuple[Iterator[Example], Iterator[Example]]


@dataclass(frozen=True)
class Rule:
    """How hash functions learn. joint: one hash, H_Q(q) + H_K(k), for both. visible: whether the utility counts visible
    keys alone. buckets, size: how many buckets there are, and how many members each has. queries, sampled_keys: S and C
    of a document, and keys those of the two draws, of tokens and of keys, for the utility "sampled".
    """

    utility: Literal["sampled", "features", "exact"]
    joint: bool
    visible: bool
    buckets: int
    size: int
    queries: int
    sampled_keys: int
    keys: tuple[int, int]


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
    def draw(q: Tensor, k: Tensor, hashes: Hashes, rule: Rule) -> "Sample":
        """Draw the sample of a document's queries and keys (B, H, L, D), the same token numbers in every head and
        sequence, but for the draws.
        """
        # A sample is a block to planning: a pass over a part of the length has that part of its keys.
        length, count, visible = q.shape[2], rule.sampled_keys, rule.visible
        most = max(count, rule.queries, _TOKENS_A_BUCKET * rule.buckets)
        tokens = drawn_positions(rule.keys[0], length, most, q.device)
        some_q, some_k = q.index_select(2, tokens), k.index_select(2, tokens)
        queries = Queries(some_q[:, :, : rule.queries], tokens[: rule.queries])
        scoring = {"scale": q.shape[-1] ** -0.5, "visible": visible}
        if length <= count:
            every = torch.zeros(length, device=q.device)
            draws, drawn_q = Draws(some_k, tokens, every), some_q
        else:
            places = torch.arange(count, device=q.device)
            bits = random_bits(rule.keys[1], places, 1).squeeze(-1)
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


def sample_flops(work: Workload, config: "LHAAttentionConfig", buckets: int, weights: int, joint: bool) -> Passes:
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


@dataclass(frozen=True)
class Batch:
    """Queries and keys (B, H, L, D), without gradient, and their buckets (B, H, L) each. key_mask, segments: as in
    AttentionInputs. projection: (H, F, D) of the random features, where the utility is "features".
    """

    q: Tensor
    k: Tensor
    query_codes: Tensor
    key_codes: Tensor
    key_mask: Tensor | None
    segments: Tensor | None
    projection: Tensor | None


def divergences(batch: Batch, rule: Rule, query: Weights, key: Weights) -> tuple[Tensor, Tensor]:
    """`lha_hash.divergence` of what H_Q learns, and of what H_K learns: (3,) each. The first of each has a gradient, of
    the weights.
    """

    def hashes(q: Tensor, k: Tensor) -> tuple[Sides, Sides]:
        return sides_of(q, k, rule.joint, query, key)

    of_queries, of_keys = (_sampled if rule.utility == "sampled" else _whole)(hashes, batch, rule)
    weights = hashes(batch.q, batch.k)
    return divergence(of_queries, weights[0].weights), divergence(of_keys, weights[1].weights)


def sides_of(q: Tensor, k: Tensor, joint: bool, query: Weights, key: Weights) -> tuple[Sides, Sides]:
    """Inputs that assign queries, and those that assign keys; both by the joint hash H_Q(q_i) + H_K(k_i) if asked."""
    if joint:
        both = Sides((q, k), (query, key))
        return both, both
    return Sides((q,), (query,)), Sides((k,), (key,))


def members(sides: Sides, document: Document, buckets: int, size: int) -> Tensor:
    """`bucket_members` of a document."""
    inputs = tuple(document.take(x) for x in sides.inputs)
    return bucket_members(Sides(inputs, sides.weights), buckets, size)


def _sampled(hashes: Hashes, batch: Batch, rule: Rule) -> Examples:
    """Return what queries and what keys learn from, of a sample of each document's."""
    drawn = []
    for document in documents(batch.key_mask, batch.segments):
        q, k = document.take(batch.q), document.take(batch.k)
        drawn.append((document, Sample.draw(q, k, hashes, rule)))
    queries = (sample.of_queries(hashes, document.take(batch.query_codes)) for document, sample in drawn)
    keys = (sample.of_keys(hashes, document.take(batch.key_codes)) for document, sample in drawn)
    return chain.from_iterable(queries), chain.from_iterable(keys)


def _whole(hashes: Hashes, batch: Batch, rule: Rule) -> Examples:
    """Return the same of all queries and keys."""
    sides = hashes(batch.q, batch.k)
    one_document = batch.key_mask is None and batch.segments is None
    # The joint hash has the same members for both.
    known = None
    if one_document and rule.joint:
        known = members(sides[0], Document(slice(None), None), rule.buckets, rule.size)
    return _examples(sides, False, batch, rule, known), _examples(sides[::-1], True, batch, rule, known)


def _examples(
    sides: tuple[Sides, Sides], of_keys: bool, batch: Batch, rule: Rule, known: Tensor | None
) -> Iterator[Example]:
    """Yield what the hash functions learn from. sides: what is to learn, and the other one, whose utility it learns.
    known: the other one's members, where all tokens are one document and they are known already.

    A bucket's members here are its best, the same number of every bucket, whatever the window (section 4.4). By the
    buckets of the plain argmax one bucket that holds all tokens would be a perfect solution, and training soon finds
    it.
    """
    for document in documents(batch.key_mask, batch.segments):
        q, k = document.take(batch.q), document.take(batch.k)
        hashed = [document.take(x) for x in sides[0].inputs]
        own = document.take(batch.key_codes if of_keys else batch.query_codes)
        other = members(sides[1], document, rule.buckets, rule.size) if known is None else known
        found: Any
        if batch.projection is not None:
            features = feature_keys if of_keys else feature_queries
            found = features(*_features(q, k, batch.projection), other, visible=rule.visible)
        else:
            exact = exact_keys if of_keys else exact_queries
            found = exact(q, k, other, scale=q.shape[-1] ** -0.5, visible=rule.visible)
        for tokens, utility in found:
            yield Example(tuple(x[:, :, tokens] for x in hashed), utility, own[:, :, tokens])


def _features(q: Tensor, k: Tensor, projection: Tensor) -> tuple[Features, Features]:
    """Random features of exp(q·k/√D). Each row has a shift of its own, so no other token makes it underflow."""
    scaled = (x * x.shape[-1] ** -0.25 for x in (q, k))
    of_queries, of_keys = (Features(*positive_features(x, projection, per_row=True)) for x in scaled)
    return of_queries, of_keys
