"""Every registered optimizer, and one that only this file registers, as CONTRIBUTING.md describes; learning rates."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from megasparse.config.schema import OptimizerConfig
from megasparse.errors import ConfigError
from megasparse.optimizers import (
    OPTIMIZERS,
    OptimizerSpec,
    build_optimizer,
    create_state,
    learning_rate,
    set_steps_done,
    state_tensors,
    steps_done,
)
from megasparse.planning.dry_run import trial_engine
from megasparse.planning.passes import ConfiguredPass
from megasparse.settings.load import build_config
from megasparse.training.ranks import Ranks
from tests.helpers.cases import together


class SignSGD(torch.optim.Optimizer):
    """Sign SGD: w ← w − lr · sign(m), m ← β·m + (1 − β)·g."""

    def __init__(self, groups: Iterable[dict[str, Any]], beta: float):
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight not in self.state:
                    self.state[weight] = SignSGDSpec().initial_state(weight)
                state = self.state[weight]
                state["step"] += 1
                state["momentum"].lerp_(weight.grad, 1 - group["beta"])
                weight -= group["lr"] * state["momentum"].sign()


class SignSGDSpec(OptimizerSpec):
    bytes_per_weight = 4

    def build(self, groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
        return SignSGD(groups, settings.betas[0])

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        return {"step": torch.zeros(()), "momentum": torch.zeros_like(weight)}


@pytest.fixture(autouse=True)
def sign_sgd(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "sign_sgd", SignSGDSpec())


every_optimizer = pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "sign_sgd"])


def test_the_parameters_of_these_tests_name_every_optimizer():
    assert list(OPTIMIZERS) == every_optimizer.args[1]


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"blocks.0.up": (3, 4), "bias": (5,), "blocks.0.stack": (2, 3, 4), "embedding": (3, 4)}
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


@every_optimizer
def test_a_first_step_creates_the_initial_state_and_the_planned_bytes(name):
    """At learning rate 0 it changes no weight."""
    config = OptimizerConfig(name=name, weight_decay=0.5)
    before, stepped, created = weights(), weights(), weights()
    optimizer, ours = build_optimizer(stepped, config), build_optimizer(created, config)
    for weight in stepped.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for weight_name, ran in stepped.items():
        old, made = before[weight_name], created[weight_name]
        assert torch.equal(old, ran)
        create_state(ours, name, made)
        kept = state_tensors(optimizer.state[ran])
        assert {k: (v.shape, v.dtype) for k, v in optimizer.state[ran].items()} == {
            k: (v.shape, v.dtype) for k, v in ours.state[made].items()
        }
        assert "step" not in kept
        assert OPTIMIZERS[name].state_bytes(weight_name, ran.shape) == sum(tensor.nbytes for tensor in kept.values())
    assert (steps_done(optimizer), steps_done(ours)) == (1, 0)
    set_steps_done(ours, 7)
    assert steps_done(ours) == 7


def test_adamw_against_its_definition_and_vectors_do_not_decay():
    config = OptimizerConfig(weight_decay=0.5, betas=(0.9, 0.98), eps=1e-8)
    matrix, vector = (weights()[name] for name in ("embedding", "bias"))
    old = [matrix.detach().clone(), vector.detach().clone()]
    optimizer = build_optimizer({"embedding": matrix, "bias": vector}, config)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for weight in (matrix, vector):
        weight.grad = torch.full_like(weight, -2.0)
    optimizer.step()  # after one step both moments are the gradient's own, so the update is lr · sign(gradient)
    torch.testing.assert_close(matrix.detach(), old[0] * (1 - 0.1 * 0.5) + 0.1)
    torch.testing.assert_close(vector.detach(), old[1] + 0.1)


SMALL = {
    "run": {"engine": "torch", "device": "cpu"},
    "model": {"max_length": 32, "layers": 1, "d_model": 16, "d_ff": 32, "heads": 2, "attention": {"pattern": ["full"]}},
    "data": {"sequence_length": 32},
    "training": {"global_batch": 1, "micro_batch": 1},
}


def test_an_added_optimizer_trains_a_step_and_is_planned():
    config = build_config(SMALL, ["optimizer.name=sign_sgd"])
    engine, batch = trial_engine(config, Ranks())
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    result = engine.train_step([batch], 0, 0.25)
    assert result.applied
    for name, weight in engine.module.named_parameters():
        moved = weight.detach() - before[name]
        torch.testing.assert_close(moved.abs(), torch.where(moved == 0, 0.0, 0.25).to(moved), rtol=0, atol=1e-6)
        assert moved.any(), name
    assert {fragment.kind for fragment in engine.fragments()} == {"weight", "momentum"}
    states = ConfiguredPass(config).states
    assert (states.moments, states.scratch) == (4 * states.trained, 0)


def test_an_unknown_optimizer_is_rejected_with_the_known_ones():
    message = 'optimizer.name: "sgd" does not fit. It must be "adamw" or "adafactor" or "muon" or "sign_sgd"'
    with pytest.raises(ConfigError, match=message):
        build_config({}, ["optimizer.name=sgd"])


def scheduled(**values: object) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"learning_rate": 0.002, "warmup_steps": 10, **values})


@together("schedule", ["constant", "cosine", "inverse_sqrt", "linear", "wsd"])
def test_warmup_is_linear_from_zero_to_the_peak(schedule):
    settings = scheduled(schedule=schedule)
    for step in range(11):
        assert learning_rate(step, 100, settings) == pytest.approx(0.002 * step / 10, rel=1e-12)
    assert learning_rate(11, 100, settings) <= 0.002
    assert learning_rate(1, 100_000, scheduled(schedule=schedule, warmup_steps=0)) == pytest.approx(0.002, rel=1e-4)


@together(
    ("schedule", "final", "share"),
    [
        ("constant", 0.25, lambda step: 1.0),
        ("cosine", 0.25, lambda step: 0.25 + 0.75 * (1 + math.cos(math.pi * (step - 10) / 90)) / 2),
        ("inverse_sqrt", 0.25, lambda step: math.sqrt(10 / step)),
        ("linear", 0.1, lambda step: 0.1 + 0.9 * (100 - step) / 90),
        ("linear", 0.0, lambda step: (100 - step) / 90),
        ("wsd", 0.25, lambda step: 1.0 if step < 80 else 1 - 0.75 * (step - 80) / 20),
    ],
)
def test_after_it_comes_the_formula(schedule, final, share):
    settings = scheduled(schedule=schedule, final_fraction=final)
    for step in range(10, 101):
        assert learning_rate(step, 100, settings) == pytest.approx(0.002 * share(step), rel=1e-12)


def test_warmup_longer_than_the_run():
    assert learning_rate(5, 5, scheduled(warmup_steps=10)) == pytest.approx(0.001)
    assert learning_rate(10, 10, scheduled(warmup_steps=10)) == pytest.approx(0.002)
