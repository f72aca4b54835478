"""Several corpora by weight: whose the i-th sequence is, and that each corpus goes on as if it were alone."""

import itertools
import os
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megasparse.data import mixture as mixture_module
from megasparse.data import reader
from megasparse.data.index import Index
from megasparse.data.mixture import BLOCK, Mixture
from megasparse.data.order import SHARDS, permutation
from megasparse.errors import ConfigError, DataError
from tests.data.damages import do, flip
from tests.data.folders import batches, counted_permutations, ramp, read_folder, rows, take, write_folder

T = 30
WEIGHTS = [[1.0], [0.7, 0.3], [2, 1], [1e-4, 1.0], [1.0, 1e-9, 3.0, 1e-4], [1 / 3] * 3, [5, 1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_after_each_block_every_corpus_has_had_its_part(weights):
    mixture, total = Mixture(weights, 0), sum(map(Fraction, weights))
    before = [0] * len(weights)
    for blocks in [*range(300), 10**6, 10**6 + 1, 10**15]:
        counts = mixture.counts(blocks)
        assert sum(counts) == blocks * BLOCK
        assert all(now >= then for now, then in zip(counts, before, strict=True))
        for weight, count in zip(weights, counts, strict=True):
            assert abs(count - Fraction(weight) / total * blocks * BLOCK) <= max(0, Fraction(len(weights) - 1, 2))
        before = counts


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_each_corpus_gets_numbers_of_its_own_each_once_and_in_order(weights):
    mixture = Mixture(weights, 5)
    places = [mixture.locate(sample) for sample in range(10 * BLOCK)]
    for block in range(10):
        parts = Counter(corpus for corpus, _ in places[block * BLOCK : (block + 1) * BLOCK])
        quotas = np.subtract(mixture.counts(block + 1), mixture.counts(block))
        assert [parts[corpus] for corpus in range(len(weights))] == quotas.tolist()
    for corpus, count in enumerate(mixture.counts(10)):
        assert [number for c, number in places if c == corpus] == list(range(count))
    if len(weights) == 1:
        assert [number for _, number in places] == list(range(10 * BLOCK))


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_any_prefix_is_near_its_part(weights):
    mixture, total = Mixture(weights, 1), sum(weights)
    counts: Counter[int] = Counter()
    for sample in range(5 * BLOCK):
        counts[mixture.locate(sample)[0]] += 1
        for corpus, weight in enumerate(weights):
            part = weight / total
            deviation = (BLOCK * part * (1 - part)) ** 0.5
            assert abs(counts[corpus] - part * (sample + 1)) <= len(weights) / 2 + 3 * deviation


def test_a_place_needs_no_history():
    weights = [0.5, 0.2, 0.3]
    straight = Mixture(weights, 2)
    want = [straight.locate(sample) for sample in range(4 * BLOCK)]
    draw = random.Random(0)
    jumping = Mixture(weights, 2)
    for sample in draw.choices(range(4 * BLOCK), k=200):
        assert Mixture(weights, 2).locate(sample) == jumping.locate(sample) == want[sample]


def test_the_permutation_is_another_for_each_seed_and_block_and_the_orders_are_not_its():
    def block(seed: int, number: int) -> tuple[int, ...]:
        mixture = Mixture([1, 1], seed)
        return tuple(mixture.locate(number * BLOCK + place)[0] for place in range(BLOCK))

    seen = {block(seed, number) for seed in range(4) for number in range(4)}
    assert len(seen) == 16
    for one in seen:
        changes = sum(a != b for a, b in itertools.pairwise(one))
        assert 0.4 * BLOCK < changes < 0.6 * BLOCK, "neighbours are independent"
    shards = permutation(BLOCK, 0, 0, SHARDS) >= BLOCK // 2
    assert block(0, 0) != tuple(shards.astype(int).tolist())


def test_a_far_place_takes_one_permutation_of_a_block(monkeypatch):
    sizes = counted_permutations(monkeypatch, mixture_module)
    for sample in (0, 10**6, 10**15):
        sizes.clear()
        corpus, number = Mixture([3, 1], 0).locate(sample)
        assert sizes == [BLOCK]
        assert number == pytest.approx(sample * (0.75, 0.25)[corpus], abs=BLOCK)


# Two folders: of the first an epoch has 23 sequences, of the second 66. No token is in both.
@pytest.fixture
def folders(tmp_path):
    small = [ramp(300, 0), ramp(399, 300)]
    large = [ramp(1000, 10_000), ramp(1000, 20_000)]
    return [write_folder(tmp_path / "small", small, width=2), write_folder(tmp_path / "large", large, width=2)]


def opened(folders: list[Path], weights: tuple[float, float] = (2, 1), tolerant: bool = False) -> Any:
    return [(Index.load(folder, tolerant), weight) for folder, weight in zip(folders, weights, strict=True)]


def test_each_corpus_has_epochs_of_its_own_and_in_each_every_sequence_once(folders):
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


def test_each_corpus_goes_as_if_it_were_alone(folders):
    mixed = rows(take(batches(opened(folders)), 30))
    for (index, _), large in zip(opened(folders), (False, True), strict=True):
        alone = list(rows(take(batches([(index, 1.0)]), 30)).values())
        stream = [row for row in mixed.values() if (row[0] >= 10_000) == large]
        assert stream == alone[: len(stream)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_position_and_number_of_ranks_give_what_one_rank_gives_straight_through(folders, world_size):
    want = rows(take(batches(opened(folders)), 200))
    draw = random.Random(world_size)
    for position in [0, 1020, 1032, *(12 * draw.randrange(195) for _ in range(6))]:
        got: dict[int, list[int]] = {}
        options = {"world_size": world_size, "start": position, "micro_batch": draw.choice([1, 2])}
        for rank in range(world_size):
            got |= rows(take(batches(opened(folders), prefetch=rank, rank=rank, **options), 3))
        assert got == {number: want[number] for number in range(position, position + 36)}


def test_the_first_batch_reads_as_much_late_as_early(tmp_path, monkeypatch):
    """Twice 40 shards, mixed two at a time: what is read is a step's tokens, after the shards that they are in."""
    folders = [
        write_folder(tmp_path / str(k), [ramp(300, 20_000 * k + 300 * i) for i in range(40)], width=2) for k in (0, 1)
    ]
    read: list[int] = []
    verified: list[Path] = []
    preadv, verify = os.preadv, reader.verify_shard

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(preadv(descriptor, buffers, offset))
        return read[-1]

    def noting(path: Path, *rest: Any) -> None:
        verified.append(path)
        verify(path, *rest)

    monkeypatch.setattr(os, "preadv", counting)
    monkeypatch.setattr(reader, "verify_shard", noting)
    for position in (0, 12 * 7, 12 * 60, 12 * 10_000, 12 * 10**12):
        read.clear()
        verified.clear()
        reader._examined.clear()
        take(batches(opened(folders), start=position), 1)
        assert sum(read) == 12 * T * 2, "the tokens of a step, and nothing else"
        assert len(read) <= 12 * 2, "a sequence is in two samples at most"
        assert 1 <= len(verified) <= 2 * 2 * 2, "two groups of each corpus, where one ends in the step"


def corrupt(folder: Path, *members: int) -> None:
    do(flip(*(member * 1024 + 512 + 20 for member in members)), folder / "train-000000.tar")


def test_damage_is_counted_and_replaced_in_its_own_corpus(folders):
    want = rows(take(batches(opened(folders)), 30))
    corrupt(folders[0], 1)
    corrupt(folders[1], 4, 5)
    data = batches(opened(folders, tolerant=True), max_damaged=0.5)
    steps = take(data, 30)
    got = rows(steps)
    different = [number for number in want if got[number] != want[number]]
    lost = {*range(100, 200), *range(10_400, 10_600)}
    assert different == [number for number in want if lost & set(want[number])]
    assert len(different) == sum(step.skipped for step in steps) > 10
    for number in different:
        assert not lost & set(got[number])
        assert (got[number][0] >= 10_000) == (want[number][0] >= 10_000)
    assert data.damage() == {
        str(folders[0] / "train-000000.tar"): {"its crc32 differs": 1},
        str(folders[1] / "train-000000.tar"): {"its crc32 differs": 2},
    }


def test_the_limit_of_damage_is_of_each_corpus(folders):
    """One of 7 samples is too much for 0.1, though it is one of 27 altogether."""
    corrupt(folders[0], 1)
    with pytest.raises(DataError, match=r"1 of the 7 samples of .train. are damaged .*max_damaged = 0\.1") as caught:
        take(batches(opened(folders, tolerant=True), max_damaged=0.1), 30)
    assert caught.value.path == str(folders[0])
    with pytest.raises(DataError, match="this shard is damaged: its sha256") as caught:
        take(batches(opened(folders)), 30)
    assert caught.value.path == str(folders[0] / "train-000000.tar")


def test_a_corpus_without_one_sequence_is_named(folders):
    with pytest.raises(ConfigError, match=r"data\.sequence_length: 400 tokens, .* in .*small has 399"):
        batches(opened(folders), sequence_length=400)


def test_all_files_are_closed_and_few_are_open(folders):
    before = len(os.listdir("/proc/self/fd"))
    data = batches(opened(folders), shuffle_shards=1)
    for _ in range(10):
        next(data)
        assert len(os.listdir("/proc/self/fd")) <= before + 2, "shuffle_shards of each corpus"
    data.close()
    assert len(os.listdir("/proc/self/fd")) == before
