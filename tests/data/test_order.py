import random
from collections import Counter

import numpy as np
import pytest

from megasparse.data import order as order_module
from megasparse.data.order import Order, permutation
from tests.data.folders import counted_permutations

GOLDEN = [7, 0, 3, 9, 4, 2, 1, 5, 8, 6]


def windows(shard_tokens: list[int], length: int) -> list[tuple[int, int]]:
    return [(shard, i) for shard, tokens in enumerate(shard_tokens) for i in range(tokens // length)]


@pytest.mark.parametrize("case", range(30))
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


def test_depends_on_nothing_but_its_arguments():
    shard_tokens = [64, 40, 0, 100, 33]
    first, second = Order(shard_tokens, 4, 5, 2), Order(shard_tokens, 4, 5, 2)
    forwards = [first.locate(i) for i in range(150)]
    backwards = [second.locate(i) for i in reversed(range(150))]
    assert forwards == backwards[::-1]


def test_epochs_and_seeds_differ():
    def epoch(seed: int, number: int) -> list[tuple[int, int]]:
        order = Order([400, 400], 4, seed, 2)
        return [order.locate(number * 200 + i) for i in range(200)]

    assert epoch(0, 0) != epoch(0, 1) and epoch(0, 0) != epoch(1, 0)


def test_the_order_stays_the_same_for_good():
    """Golden: another order here would break the resuming of every run there is."""
    assert permutation(10, 7, 3, 1).tolist() == GOLDEN
    words = np.random.Philox(np.random.SeedSequence(7, spawn_key=(3, 1))).random_raw(10).tolist()
    assert sorted(range(10), key=lambda i: words[i]) == GOLDEN


def test_permutations_are_uniform():
    counts = Counter(tuple(permutation(3, seed, 0, 0)) for seed in range(1200))
    assert len(counts) == 6
    assert all(140 < count < 260 for count in counts.values())  # 200 ± 12.9 each


def test_a_late_sample_costs_no_more_than_an_early_one(monkeypatch):
    sizes = counted_permutations(monkeypatch, order_module)
    order = Order([1000] * 64, 10, 0, 4)
    for sample in (0, 6_399, 123_456_789_012):
        order.locate(sample)
    assert sizes == [64, 400, 400, 64, 400]  # the first two are of one epoch
    sizes.clear()
    order.locate(123_456_789_012)
    assert sizes == []


@pytest.mark.parametrize("shard_tokens", [[40, 12, 0, 28, 4], [4], [64, 4, 4]])
def test_substitutes_are_all_others_and_those_of_the_same_shard_first(shard_tokens):
    order = Order(shard_tokens, 4, 5, 2)
    for sample in range(2 * order.sequences_per_epoch):
        shard, sequence = order.locate(sample)
        found = list(order.substitutes(sample, lambda shard: False))
        assert sorted([(shard, sequence), *found]) == windows(shard_tokens, 4)
        own = [place for place in found if place[0] == shard]
        assert found[: len(own)] == own and len(own) == shard_tokens[shard] // 4 - 1
        left = list(order.substitutes(sample, {0, shard}.__contains__))
        assert left == [place for place in found if place[0] not in (0, shard)]


def test_neighbours_have_different_substitutes():
    """A lost stretch of text must not be replaced by one sequence again and again."""
    order = Order([400, 400], 4, 5, 2)
    for lost in ({(0, i) for i in range(10, 40)}, {(0, i) for i in range(100)}):
        found = []
        for sample in range(200):
            if order.locate(sample) in lost:
                found += [next(p for p in order.substitutes(sample, lambda shard: False) if p not in lost)]
        assert len(set(found)) == len(found) == len(lost)


@pytest.mark.parametrize("group", [1, 2, 4, 10])
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
