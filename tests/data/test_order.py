"""The order of sequences, and of several corpora by weight: every position is computed, none depends on history."""

import os
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megasparse.data import order as order_module
from megasparse.data import shard_file
from megasparse.data.index import Index
from megasparse.data.order import MIXTURE_BLOCK, SHARDS, Mixture, Order, permutation
from tests.data.folders import batches, counted_permutations, ramp, read_folder, rows, take, write_folder
from tests.helpers.cases import together

GOLDEN = [7, 0, 3, 9, 4, 2, 1, 5, 8, 6]


def windows(shard_tokens: list[int], length: int) -> list[tuple[int, int]]:
    return [(shard, i) for shard, tokens in enumerate(shard_tokens) for i in range(tokens // length)]


@together("case", range(10))
def test_each_epoch_has_every_sequence_once_and_mixes_only_within_groups(case):
    draw = random.Random(case)
    shard_tokens = [draw.randrange(1, 60) for _ in range(draw.randrange(1, 12))]
    shard_tokens[0] += 7  # at least one sequence
    length, group, seed = draw.randrange(1, 8), draw.randrange(1, 14), draw.randrange(2**40)
    order = Order(shard_tokens, length, seed, group)
    expected = windows(shard_tokens, length)

    assert order.sequences_per_epoch == len(expected)
    assert order.unused_tokens == sum(tokens % length for tokens in shard_tokens)
    for epoch in (0, 1, 7):
        found = [order.locate(epoch * len(expected) + i) for i in range(len(expected))]
        assert sorted(found) == expected
        # groups are runs of whole shards: what has left the window of open shards never comes back
        shards = permutation(len(shard_tokens), seed, epoch, order_module.SHARDS)
        place = 0
        for first in range(0, len(shards), group):
            members = {int(shard) for shard in shards[first : first + group]}
            count = sum(shard_tokens[shard] // length for shard in members)
            assert {shard for shard, _ in found[place : place + count]} <= members
            place += count


def test_the_order_stays_the_same_for_good():
    """Golden: another order here would break the resuming of every run there is."""
    assert permutation(10, 7, 3, 1).tolist() == GOLDEN
    words = np.random.Philox(np.random.SeedSequence(7, spawn_key=(3, 1))).random_raw(10).tolist()
    assert sorted(range(10), key=lambda i: words[i]) == GOLDEN


def test_permutations_are_uniform():
    counts = Counter(tuple(permutation(3, seed, 0, 0)) for seed in range(1200))
    assert len(counts) == 6
    assert all(140 < count < 260 for count in counts.values())  # 200 ± 12.9 each


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_group_of_an_epoch_has_an_order_of_its_own(shards):
    order = Order([24 // shards] * 4 * shards, 1, seed=7, group=shards)
    orders = {tuple(order.locate(24 * group + i)[1] for i in range(24)) for group in range(4)}
    assert len(orders) == 4


def test_a_late_sample_costs_no_more_than_an_early_one(monkeypatch):
    sizes = counted_permutations(monkeypatch, order_module)
    order = Order([1000] * 64, 10, 0, 4)
    for sample in (0, 6_399, 123_456_789_012):
        order.locate(sample)
    assert sizes == [64, 400, 400, 64, 400]  # the first two are of one epoch
    sizes.clear()
    order.locate(123_456_789_012)
    assert sizes == []


@together("group", [1, 2, 4, 10])
def test_the_shards_ahead_are_those_that_the_next_sequences_are_in(group):
    order = Order([300, 20, 210, 90, 600, 120, 270], 30, seed=5, group=group)
    last = 2 * order.sequences_per_epoch
    groups = [order.group_of(sample) for sample in range(last)]
    for sample in range(0, order.sequences_per_epoch):
        ahead = order.shards_ahead(sample)
        here = {order.locate(i)[0] for i in range(last) if groups[i] == groups[sample]}
        after = groups[groups.index(groups[sample]) + groups.count(groups[sample])]
        there = {order.locate(i)[0] for i in range(last) if groups[i] == after}
        assert set(ahead) == here | there and len(ahead) == len(set(ahead))
        assert set(ahead[: len(here)]) == here


# Mixtures
T = 30
WEIGHTS = [[1.0], [0.7, 0.3], [2, 1], [1e-4, 1.0], [1.0, 1e-9, 3.0, 1e-4], [1 / 3] * 3, [5, 1, 1, 1, 1, 1, 1]]


@together("weights", WEIGHTS)
def test_after_each_block_every_corpus_has_had_its_part(weights):
    mixture, total = Mixture(weights, 0), sum(map(Fraction, weights))
    before = [0] * len(weights)
    for blocks in [*range(300), 10**6, 10**6 + 1, 10**15]:
        counts = mixture.counts(blocks)
        assert sum(counts) == blocks * MIXTURE_BLOCK
        assert all(now >= then for now, then in zip(counts, before, strict=True))
        for weight, count in zip(weights, counts, strict=True):
            assert abs(count - Fraction(weight) / total * blocks * MIXTURE_BLOCK) <= Fraction(len(weights) - 1, 2)
        before = counts


@together("weights", WEIGHTS)
def test_each_corpus_gets_separate_consecutive_numbers(weights):
    mixture = Mixture(weights, 5)
    places = [mixture.locate(sample) for sample in range(10 * MIXTURE_BLOCK)]
    for block in range(10):
        parts = Counter(corpus for corpus, _ in places[block * MIXTURE_BLOCK : (block + 1) * MIXTURE_BLOCK])
        quotas = np.subtract(mixture.counts(block + 1), mixture.counts(block))
        assert [parts[corpus] for corpus in range(len(weights))] == quotas.tolist()
    for corpus, count in enumerate(mixture.counts(10)):
        assert [number for c, number in places if c == corpus] == list(range(count))
    if len(weights) == 1:
        assert [number for _, number in places] == list(range(10 * MIXTURE_BLOCK))


def test_permutations_differ_between_seeds_and_blocks_and_from_the_orders():
    def block(seed: int, number: int) -> tuple[int, ...]:
        mixture = Mixture([1, 1], seed)
        return tuple(mixture.locate(number * MIXTURE_BLOCK + place)[0] for place in range(MIXTURE_BLOCK))

    assert len({block(seed, number) for seed in range(4) for number in range(4)}) == 16
    shards = permutation(MIXTURE_BLOCK, 0, 0, SHARDS) >= MIXTURE_BLOCK // 2
    assert block(0, 0) != tuple(shards.astype(int).tolist())


def test_a_far_place_takes_one_permutation_of_a_block(monkeypatch):
    sizes = counted_permutations(monkeypatch, order_module)
    for sample in (0, 10**6, 10**15):
        sizes.clear()
        corpus, number = Mixture([3, 1], 0).locate(sample)
        assert sizes == [MIXTURE_BLOCK]
        assert number == pytest.approx(sample * (0.75, 0.25)[corpus], abs=MIXTURE_BLOCK)


# Two folders: of the first an epoch has 23 sequences, of the second 66. No token is in both.
@pytest.fixture
def folders(tmp_path):
    small = [ramp(300, 0), ramp(399, 300)]
    large = [ramp(1000, 10_000), ramp(1000, 20_000)]
    return [write_folder(tmp_path / "small", small, width=2), write_folder(tmp_path / "large", large, width=2)]


def opened(folders: list[Path], weights: tuple[float, float] = (2, 1)) -> list[tuple[Index, float]]:
    return [(Index.load(folder), weight) for folder, weight in zip(folders, weights, strict=True)]


def test_each_corpus_has_separate_epochs_with_every_sequence_once(folders):
    """Twice as many of the smaller one: nine of its epochs in three of the larger."""
    data = batches(opened(folders))
    assert (data.sequences_per_epoch, data.unused_tokens) == (23 + 66, 9 + 20)
    got = rows(take(data, 30))
    windows = [
        [tuple(shard[i : i + T]) for shard in read_folder(folder) for i in range(0, len(shard) - T + 1, T)]
        for folder in folders
    ]
    streams = [[tuple(row) for row in got.values() if (row[0] >= 10_000) == large] for large in (False, True)]
    assert len(streams[0]) + len(streams[1]) == 360 and abs(len(streams[0]) - 240) < 30
    for stream, all_of_them in zip(streams, windows, strict=True):
        n = len(all_of_them)
        epochs = [stream[i : i + n] for i in range(0, len(stream) - n + 1, n)]
        assert len(epochs) == len(stream) // n > 0
        for epoch in epochs:
            assert sorted(epoch) == sorted(all_of_them)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs), "each epoch has another order"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_order_does_not_depend_on_position_or_number_of_ranks(folders, world_size):
    want = rows(take(batches(opened(folders)), 200))
    draw = random.Random(world_size)
    for position in [0, 1020, 1032, *(12 * draw.randrange(195) for _ in range(6))]:
        got: dict[int, list[int]] = {}
        options = {"world_size": world_size, "start": position, "micro_batch": draw.choice([1, 2])}
        for rank in range(world_size):
            got |= rows(take(batches(opened(folders), rank=rank, **options), 3))
        assert got == {number: want[number] for number in range(position, position + 36)}


def test_the_first_batch_reads_as_much_late_as_early(tmp_path, monkeypatch):
    """Twice 40 shards, mixed two at a time: a step reads its shards and then its tokens."""
    folders = [
        write_folder(tmp_path / str(k), [ramp(300, 20_000 * k + 300 * i) for i in range(40)], width=2) for k in (0, 1)
    ]
    read: list[int] = []
    verified: list[Path] = []
    preadv, verify = os.preadv, shard_file.verify_shard

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(preadv(descriptor, buffers, offset))
        return read[-1]

    def noting(path: Path, *rest: Any) -> None:
        verified.append(path)
        verify(path, *rest)

    monkeypatch.setattr(os, "preadv", counting)
    monkeypatch.setattr(shard_file, "verify_shard", noting)
    for position in (0, 12 * 7, 12 * 60, 12 * 10_000, 12 * 10**12):
        read.clear()
        verified.clear()
        shard_file._verified.clear()
        with batches(opened(folders), start=position) as data:
            next(data._steps)
        assert sum(read) == 12 * T * 2, "the tokens of a step, and nothing else"
        assert len(read) <= 12 * 2, "a sequence is in two samples at most"
        assert 1 <= len(verified) <= 2 * 2 * 2, "two groups of each corpus, where one ends in the step"
