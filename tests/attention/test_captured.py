"""A captured graph of launches draws what each step draws, though its launches keep the arguments of one step."""

import pytest
import torch

from megasparse.attention.contract import AttentionContext
from megasparse.attention.heads import Padding
from megasparse.model.build import build_model
from megasparse.ops.keys import DeviceStep
from megasparse.ops.random import RngContext
from tests.helpers.captured import Captured
from tests.helpers.comparing import objective_of
from tests.helpers.kernels import DEVICE
from tests.helpers.models import attention, layer_of, random_tokens, small

LENGTH = 24
SLOWER = ("yoso", "yoso gaussian, convolution", "smyrf", "random")
NAMES = ["lsh", "lha", "smart_bird", *(pytest.param(name, marks=pytest.mark.kernels) for name in SLOWER)]


def assert_replays_draw_anew(results):
    """results: outputs and gradients by the draws of a step."""
    samples, step = torch.tensor([3, 8], device=DEVICE), DeviceStep(0, DEVICE)
    captured = RngContext(5, step, samples, training=True)
    results(captured)
    with Captured() as graph:
        found = results(captured)
    before = [x.clone() for x in found]
    step.set(7)
    graph.replay()
    expected = results(RngContext(5, 7, samples, training=True))
    assert all(torch.equal(own, eager) for own, eager in zip(found, expected, strict=True))
    assert not all(torch.equal(own, old) for own, old in zip(found, before, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_layer_draws_what_each_step_draws(name, monkeypatch):
    """Its kernels and torch's operations, forward and backward; and the host reads nothing."""
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")
    layer = layer_of(name).to(DEVICE)
    x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()

    def results(rng):
        found = layer(x, AttentionContext(0, rng), Padding())
        grads = torch.autograd.grad(objective_of(found), [x, *layer.parameters()], allow_unused=True)
        return [found.out.detach(), *(grad for grad in grads if grad is not None)]

    assert_replays_draw_anew(results)


@pytest.mark.parametrize("kind,implementation,dropout", [("lsh", "triton", 0.0), ("smart_bird", "blockwise", 0.1)])
def test_a_captured_model_draws_what_each_step_draws(kind, implementation, dropout, monkeypatch):
    """Every dropout, which a reversible backward draws again; kernels have none of attention probabilities."""
    monkeypatch.setenv("MEGASPARSE_OPS", implementation)
    pattern = attention(kind).model_copy(update={"dropout": dropout})
    config = small(layers=1, attention=pattern, dropout=0.2, feed_forward_tiles=2)
    model = build_model(config, seed=0).to(DEVICE)
    tokens = random_tokens(2, 12).to(DEVICE)

    def results(rng):
        model.zero_grad()
        objective = model(tokens, rng)[0]
        objective.backward()
        return [objective.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]

    assert_replays_draw_anew(results)
