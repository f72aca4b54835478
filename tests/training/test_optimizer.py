"""Optimizer state as a checkpoint sees it."""

import pytest
import torch

from megasparse.config.schema import OptimizerConfig
from megasparse.training.optimizer import build_optimizer, create_state, set_steps_done, state_tensors, steps_done


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((3, 4), (5,), (2, 3, 4))]


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_created_state_is_what_the_first_step_creates(name: str) -> None:
    config = OptimizerConfig.model_validate({"name": name})
    stepped, created = weights(), weights()
    optimizer, ours = build_optimizer(stepped, config), build_optimizer(created, config)
    for weight in stepped:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for ran, made in zip(stepped, created, strict=True):
        create_state(ours, made)
        assert {k: (v.shape, v.dtype) for k, v in optimizer.state[ran].items()} == {
            k: (v.shape, v.dtype) for k, v in ours.state[made].items()
        }
        assert "step" not in state_tensors(ours.state[made])
    assert (steps_done(optimizer), steps_done(ours)) == (1, 0)
    set_steps_done(ours, 7)
    assert steps_done(ours) == 7


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_step_before_the_learning_rate_is_set_changes_nothing(name: str) -> None:
    config = OptimizerConfig.model_validate({"name": name, "weight_decay": 0.5})
    before, after = weights(), weights()
    optimizer = build_optimizer(after, config)
    for weight in after:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_adamw_against_its_definition_and_vectors_do_not_decay() -> None:
    config = OptimizerConfig(weight_decay=0.5, betas=(0.9, 0.98), eps=1e-8)
    matrix, vector = weights()[:2]
    old = [matrix.detach().clone(), vector.detach().clone()]
    optimizer = build_optimizer([matrix, vector], config)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for weight in (matrix, vector):
        weight.grad = torch.full_like(weight, -2.0)
    optimizer.step()  # after one step both moments are the gradient's own, so the update is lr · sign(gradient)
    torch.testing.assert_close(matrix.detach(), old[0] * (1 - 0.1 * 0.5) + 0.1)
    torch.testing.assert_close(vector.detach(), old[1] + 0.1)
