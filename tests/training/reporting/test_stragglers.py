"""Stragglers against the definition: a median of 16 steps over 1.5 times the usual one, reported once."""

from statistics import median

import numpy as np
import pytest

from megasparse.training.reporting.stragglers import Stragglers


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_half_a_second_slower_is_named_within_20_steps_with_its_ratio(slow):
    noise = np.random.default_rng(0)
    stragglers, lines = Stragglers(2), []
    for _ in range(20):
        seconds = [0.5 * noise.uniform(0.95, 1.05) for _ in range(2)]
        seconds[slow] += 0.5
        lines += stragglers.add(seconds)
    (line,) = lines
    assert line.startswith(f"rank {slow} ")
    assert float(line.split(": ")[1].split(" ×")[0]) == pytest.approx(2.0, rel=0.1)
    assert stragglers.worst_ratio == pytest.approx(2.0, rel=0.1)


def test_the_ratio_is_that_of_the_medians_of_the_last_16_steps():
    table = np.random.default_rng(1).uniform(0.1, 2.0, (40, 5))
    stragglers = Stragglers(5)
    for step, row in enumerate(table):
        stragglers.add(row.tolist())
        if step < 15:
            assert stragglers.worst_ratio == 1.0
        else:
            medians = [median(table[step - 15 : step + 1, rank]) for rank in range(5)]
            assert stragglers.worst_ratio == pytest.approx(max(medians) / median(medians), rel=1e-12)


def test_even_ranks_and_a_few_slow_steps_are_no_stragglers():
    stragglers = Stragglers(4)
    assert [stragglers.add([1.0, 1.0, 1.0, 1.4]) for _ in range(32)] == [[]] * 32
    assert stragglers.worst_ratio == pytest.approx(1.4)
    assert [stragglers.add([1.0, 1.0, 1.0, 9.0]) for _ in range(7)] == [[]] * 7
    even = Stragglers(2)
    assert [even.add([0.25, 0.25]) for _ in range(20)] == [[]] * 20
    assert even.worst_ratio == 1.0


def test_a_straggler_is_told_again_only_after_it_ended():
    stragglers = Stragglers(3)
    reported = [bool(stragglers.add([1.0, 1.0, 3.0])) for _ in range(40)]
    assert reported.index(True) == 15 and sum(reported) == 1
    assert not any(stragglers.add([1.0, 1.0, 1.0]) for _ in range(40))
    assert sum(bool(stragglers.add([1.0, 1.0, 3.0])) for _ in range(40)) == 1


def test_one_rank_alone_and_steps_of_no_time():
    alone, instant = Stragglers(1), Stragglers(2)
    for _ in range(20):
        assert alone.add([5.0]) == []
        assert instant.add([0.0, 0.0]) == []
    assert alone.worst_ratio == 1.0
