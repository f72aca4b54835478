"""The learning rate against its closed formula."""

import math

import pytest

from megasparse.config.schema import OptimizerConfig
from megasparse.optimizers import learning_rate


def config(**values: object) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"learning_rate": 0.002, "warmup_steps": 10, **values})


@pytest.mark.parametrize("schedule", ["constant", "cosine", "inverse_sqrt", "linear"])
def test_warmup_is_linear_from_zero_to_the_peak(schedule):
    settings = config(schedule=schedule)
    for step in range(11):
        assert learning_rate(step, 100, settings) == pytest.approx(0.002 * step / 10, rel=1e-12)
    assert learning_rate(11, 100, settings) <= 0.002
    assert learning_rate(1, 100_000, config(schedule=schedule, warmup_steps=0)) == pytest.approx(0.002, rel=1e-4)


@pytest.mark.parametrize(
    ("schedule", "final", "share"),
    [
        ("constant", 0.25, lambda step: 1.0),
        ("cosine", 0.25, lambda step: 0.25 + 0.75 * (1 + math.cos(math.pi * (step - 10) / 90)) / 2),
        ("inverse_sqrt", 0.25, lambda step: math.sqrt(10 / step)),
        ("linear", 0.1, lambda step: 0.1 + 0.9 * (100 - step) / 90),
        ("linear", 0.0, lambda step: (100 - step) / 90),
    ],
)
def test_after_it_comes_the_formula(schedule, final, share):
    settings = config(schedule=schedule, final_fraction=final)
    for step in range(10, 101):
        assert learning_rate(step, 100, settings) == pytest.approx(0.002 * share(step), rel=1e-12)


def test_warmup_longer_than_the_run():
    assert learning_rate(5, 5, config(warmup_steps=10)) == pytest.approx(0.001)
    assert learning_rate(10, 10, config(warmup_steps=10)) == pytest.approx(0.002)
