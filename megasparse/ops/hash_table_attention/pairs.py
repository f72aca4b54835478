"""Gradients of q and k over the pairs that collide (YOSO Eq. 22): cost nnz·(m + D), in blocks of bounded size.

G rows, m hashes, L length, D head dim.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megasparse.ops.blocks import at_most
from megasparse.ops.hash_table_attention.layout import Buckets

_BLOCK_PAIRS = 1 << 15  # collisions at a time, more only where one query has more


class _Runs(NamedTuple):
    """Each query's keys in each hash, a run of the keys in bucket order: order[start : start + size].

    order: (G, m, Lk) key numbers. start, size: (G·Lq, m).
    """

    order: Tensor
    start: Tensor
    size: Tensor


def pair_gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor, meet: Buckets, causal: bool) -> tuple[Tensor, Tensor]:
    """Σ_j c_ij (g_i·v_j) k_j for each query and Σ_i c_ij (g_i·v_j) q_i for each key, c_ij the hashes they collide in.

    q, g: (G, Lq, D). k, v: (G, Lk, D). causal: only j <= i.
    """
    runs = _runs(meet, causal)
    into_q, into_k = torch.zeros_like(q), torch.zeros_like(k)
    sources, targets = [x.flatten(0, 1) for x in (q, k, v, g)], [x.flatten(0, 1) for x in (into_q, into_k)]
    for first, last in _blocks(runs.size):
        query, key, count = _colliding(runs, first, last, q.shape[1])
        # No more than a block's pairs at a time, where one query alone has more
        for i, j, c in zip(*(x.split(at_most(_BLOCK_PAIRS)) for x in (query, key, count)), strict=True):
            weight = ((sources[3][i] * sources[2][j]).sum(-1) * c)[:, None]
            targets[0].index_add_(0, i, sources[1][j] * weight)
            targets[1].index_add_(0, j, sources[0][i] * weight)
    return into_q, into_k


def _runs(meet: Buckets, causal: bool) -> _Runs:
    rows, hashes, length = meet.queries.shape
    keys = meet.keys.shape[2]
    position = torch.arange(keys, device=meet.keys.device)
    latest = torch.arange(length, device=position.device) if causal else keys - 1
    order = torch.empty(rows, hashes, keys, dtype=torch.int32, device=position.device)
    start = torch.empty(rows, length, hashes, dtype=torch.int32, device=position.device)
    size = torch.empty_like(start)
    for hash_ in range(hashes):
        # In order of (bucket, position): a bucket's keys up to a position are a run.
        ordered, order[:, hash_] = torch.sort(meet.keys[:, hash_].to(torch.int64) * keys + position, dim=-1)
        lowest = meet.queries[:, hash_].to(torch.int64) * keys
        begin = torch.searchsorted(ordered, lowest)
        start[..., hash_] = begin
        size[..., hash_] = torch.searchsorted(ordered, lowest + latest, right=True) - begin
    return _Runs(order, start.flatten(0, 1), size.flatten(0, 1))


def _blocks(size: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of queries with about a block's collisions each."""
    through = size.sum(1, dtype=torch.int64).cumsum(0)  # collisions of queries up to here
    first = done = 0
    while first < len(size):
        last = int(torch.searchsorted(through, done + at_most(_BLOCK_PAIRS), right=True))
        last = max(last, first + 1)
        done = int(through[last - 1])
        yield first, last
        first = last


def _colliding(runs: _Runs, first: int, last: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of queries first..last − 1 of G·Lq, each once: query, key of G·Lk, and hashes it collides in."""
    hashes, keys = runs.order.shape[1:]
    size, start = (x[first:last].flatten().to(torch.int64) for x in (runs.size, runs.start))
    run = torch.repeat_interleave(torch.arange(len(size), device=size.device), size)  # of each collision
    within = torch.arange(len(run), device=size.device) - (size.cumsum(0) - size)[run]
    query = run // hashes  # counted from `first`
    row = (query + first) // length
    key = runs.order.flatten()[(row * hashes + run % hashes) * keys + start[run] + within]
    pair, count = torch.unique(query * keys + key, return_counts=True)
    query = pair // keys + first
    return query, pair % keys + query // length * keys, count
