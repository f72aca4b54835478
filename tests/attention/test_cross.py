"""Cross-attention against its definition, dense and in float64."""

import pytest
import torch

from megasparse.attention.contract import AttentionContext
from megasparse.attention.cross import CrossAttention, EncoderOutput
from megasparse.model.build import initialise
from tests.helpers.models import small_pair, training_draws


@pytest.mark.parametrize(("target", "source"), [(25, 40), (40, 25), (30, 30), (1, 9)])
def test_outputs_and_gradients_equal_the_definition(target, source):
    config = small_pair(source={"length": 40})
    attention = CrossAttention(config)
    initialise(attention, config, seed=5)
    generator = torch.Generator().manual_seed(0)
    x, states = (torch.randn(2, n, 32, generator=generator, requires_grad=True) for n in (target, source))
    real = torch.rand(2, source, generator=generator) < 0.7
    out = attention(x, EncoderOutput(states, real), AttentionContext(1, training_draws(2)))

    w = {name: p.detach().double() for name, p in attention.named_parameters()}
    inputs = (("query", x), ("key", states), ("value", states))
    q, k, v = ((y.double() @ w[f"{name}.weight"].T).unflatten(-1, (2, -1)).transpose(1, 2) for name, y in inputs)
    score = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~real[:, None, None], -torch.inf)
    exact = (score.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w["output.weight"].T
    assert (out - exact).abs().max() < 1e-5
    weight = torch.randn(exact.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), (x, states)) for y in (out, exact)), strict=True):
        assert (a - b).abs().max() < 1e-4
