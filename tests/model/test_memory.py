"""Activation memory, counted tensor by tensor: flat in depth, falling with the tiles."""

import pytest
import torch

from megasparse.config.attention import LocalAttentionConfig, LSHAttentionConfig
from megasparse.config.schema import ModelConfig
from megasparse.model.build import build_model
from tests.helpers.models import attention, random_tokens, training_draws
from tests.helpers.peak_memory import PeakMemory

LENGTH, D_FF = 1024, 4096


def step_memory(**changes) -> PeakMemory:
    """Activations of the second step: weights and their gradients exist before it."""
    layers = attention("local", "lsh").model_copy(
        update={"local": LocalAttentionConfig(chunk=64), "lsh": LSHAttentionConfig(chunk=64, rounds=1)}
    )
    settings = dict(max_length=LENGTH, layers=2, d_model=256, d_ff=256, heads=2, head_dim=16, attention=layers)
    model = build_model(ModelConfig(**{**settings, **changes}), seed=0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = random_tokens(1, LENGTH)
    with torch.no_grad():
        model.embedding(tokens[:, :-1], 0)  # tables of positions are kept from the first step on
    with PeakMemory() as memory:
        model(tokens, training_draws(1))[0].backward()
    return memory


@pytest.fixture(scope="module")
def two_layers():
    return step_memory(feed_forward_tiles=4, loss_tiles=4)


def test_20_reversible_layers_need_what_2_do(two_layers):
    twenty = step_memory(layers=20, feed_forward_tiles=4, loss_tiles=4)
    assert twenty.peak < 1.05 * two_layers.peak


def test_stored_activations_grow_with_depth(two_layers):
    eight = step_memory(layers=8, activations="stored", feed_forward_tiles=4, loss_tiles=4)
    assert eight.peak > 1.5 * two_layers.peak


def test_the_peak_falls_with_the_tiles():
    wide = {"d_ff": D_FF, "d_model": 64, "vocabulary": 512, "layers": 1}
    whole = step_memory(**wide)
    tiled = step_memory(**wide, feed_forward_tiles=16, loss_tiles=16)
    assert whole.largest >= LENGTH * D_FF * 4
    assert tiled.largest < LENGTH * D_FF * 4 / 4, "the hidden layer never exists whole"
    assert tiled.peak < 0.5 * whole.peak
