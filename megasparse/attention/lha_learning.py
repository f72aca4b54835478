"""What LHA's hash functions learn: the attention utility of every bucket, whole, by random features, or of a sample.

B batch, H heads, L length, D head dim, N buckets, F random features.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from megasparse.attention.documents import Document, documents
from megasparse.attention.lha_hash import Example, Sides, Weights, bucket_members, divergence
from megasparse.attention.lha_sample import Sample, SampleRule
from megasparse.ops.attention_utility import Features, exact_keys, exact_queries, feature_keys, feature_queries
from megasparse.ops.custom import custom
from megasparse.ops.keys import Halves
from megasparse.ops.random_features import positive_features

Hashes = Callable[[Tensor, Tensor], tuple[Sides, Sides]]
Examples = tuple[Iterator[Example], Iterator[Example]]


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


@dataclass(frozen=True)
class Rule:
    """How hash functions learn. joint: one hash, H_Q(q) + H_K(k), for both. sample: for the utility "sampled", with the
    keys of its two draws.
    """

    utility: Literal["sampled", "features", "exact"]
    joint: bool
    sample: SampleRule
    keys: tuple[Halves, Halves]


def _like(batch: Batch, rule: Rule, query: Weights, key: Weights) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(query[0].dtype, torch.float32)
    return query[0].new_empty(3, dtype=dtype), query[0].new_empty(3, dtype=dtype)


@custom(_like)
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


def members(sides: Sides, document: Document, rule: SampleRule) -> Tensor:
    """`bucket_members` of a document."""
    inputs = tuple(document.take(x) for x in sides.inputs)
    return bucket_members(Sides(inputs, sides.weights), rule.buckets, rule.size)


def _sampled(hashes: Hashes, batch: Batch, rule: Rule) -> Examples:
    """Return what queries and what keys learn from, of a sample of each document's."""
    drawn = []
    for document in documents(batch.key_mask, batch.segments):
        q, k = document.take(batch.q), document.take(batch.k)
        drawn.append((document, Sample.draw(q, k, hashes, rule.sample, rule.keys)))
    queries = (sample.of_queries(hashes, document.take(batch.query_codes)) for document, sample in drawn)
    keys = (sample.of_keys(hashes, document.take(batch.key_codes)) for document, sample in drawn)
    return chain.from_iterable(queries), chain.from_iterable(keys)


def _whole(hashes: Hashes, batch: Batch, rule: Rule) -> Examples:
    """Return the same of all queries and keys."""
    sides = hashes(batch.q, batch.k)
    one_document = batch.key_mask is None and batch.segments is None
    # The joint hash has the same members for both.
    known = members(sides[0], Document(slice(None), None), rule.sample) if one_document and rule.joint else None
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
    visible = rule.sample.visible
    for document in documents(batch.key_mask, batch.segments):
        q, k = document.take(batch.q), document.take(batch.k)
        hashed = [document.take(x) for x in sides[0].inputs]
        own = document.take(batch.key_codes if of_keys else batch.query_codes)
        other = members(sides[1], document, rule.sample) if known is None else known
        found: Any
        if batch.projection is not None:
            features = feature_keys if of_keys else feature_queries
            found = features(*_features(q, k, batch.projection), other, visible=visible)
        else:
            exact = exact_keys if of_keys else exact_queries
            found = exact(q, k, other, scale=q.shape[-1] ** -0.5, visible=visible)
        for tokens, utility in found:
            yield Example(tuple(x[:, :, tokens] for x in hashed), utility, own[:, :, tokens])


def _features(q: Tensor, k: Tensor, projection: Tensor) -> tuple[Features, Features]:
    """Random features of exp(q·k/√D). Each row has a shift of its own, so no other token makes it underflow."""
    scaled = (x * x.shape[-1] ** -0.25 for x in (q, k))
    of_queries, of_keys = (Features(*positive_features(x, projection, per_row=True)) for x in scaled)
    return of_queries, of_keys
