"""The learning rate against its closed formula."""

import math

import pytest

from megasparse.config.schema import OptimizerConfig
from megasparse.training.schedule import learning_rate


def config(**values: object) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"learning_rate": 0.002, "warmup_steps": 10, **values})


@pytest.mark.parametrize("schedule", ["constant", "cosine", "inverse_sqrt"])
def test_warmup_is_linear_from_zero_to_the_peak(schedule: str) -> None:
    settings = config(schedule=schedule)
    assert learning_rate(0, 100, settings) == 0
    for step in range(1, 11):
        assert learning_rate(step, 100, settings) == pytest.approx(0.002 * step / 10, rel=1e-12)
    assert learning_rate(11, 100, settings) <= 0.002


def test_constant() -> None:
    assert {learning_rate(step, 100, config(schedule="constant")) for step in range(10, 101)} == {0.002}


def test_cosine() -> None:
    settings = config(schedule="cosine", final_fraction=0.25)
    for step in range(10, 101):
        share = (1 + math.cos(math.pi * (step - 10) / 90)) / 2
        assert learning_rate(step, 100, settings) == pytest.approx(0.002 * (0.25 + 0.75 * share), rel=1e-12)
    assert learning_rate(100, 100, settings) == pytest.approx(0.0005, rel=1e-12)
    assert learning_rate(55, 100, settings) == pytest.approx((0.002 + 0.0005) / 2, rel=1e-12)


def test_inverse_square_root() -> None:
    settings = config(schedule="inverse_sqrt")
    for step in (10, 40, 90, 1000):
        assert learning_rate(step, 1000, settings) == pytest.approx(0.002 * math.sqrt(10 / step), rel=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "inverse_sqrt"])
def test_without_warmup_the_first_step_has_the_peak(schedule: str) -> None:
    rate = learning_rate(1, 1000, config(schedule=schedule, warmup_steps=0))
    assert rate == pytest.approx(0.002, rel=1e-4)


def test_warmup_longer_than_the_run() -> None:
    assert learning_rate(5, 5, config(warmup_steps=10)) == pytest.approx(0.001)
    assert learning_rate(10, 10, config(warmup_steps=10)) == pytest.approx(0.002)


def test_linear() -> None:
    settings = config(schedule="linear", final_fraction=0.1)
    assert learning_rate(5, 100, settings) == pytest.approx(0.001, rel=1e-12)
    for step in range(10, 101):
        share = (100 - step) / 90
        assert learning_rate(step, 100, settings) == pytest.approx(0.002 * (0.1 + 0.9 * share), rel=1e-12)
    assert learning_rate(100, 100, config(schedule="linear", final_fraction=0.0)) == 0.0
