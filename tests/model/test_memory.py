"""Activation memory, counted tensor by tensor: flat in depth, falling with the tiles, and with groups of heads."""

import pytest
import torch

from megasparse.config.schema import ModelConfig
from megasparse.model.build import build_model
from tests.helpers.models import attention, random_tokens, training_draws
from tests.helpers.operators import smaller_blocks
from tests.helpers.peak_memory import PeakMemory

LENGTH, D_FF = 1024, 4096


def step_memory(**changes) -> PeakMemory:
    """Activations of the second step: weights and their gradients exist before it."""
    layers = attention("local", "lsh", local={"chunk": 64}, lsh={"chunk": 64, "rounds": 1})
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


def test_20_reversible_layers_need_as_much_memory_as_2(two_layers):
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


LONG, WIDTH, HEADS = 2048, 64, 8
STREAM = LONG * WIDTH * 4
"""Bytes of a stream; queries, keys or values of all heads in fp32 are as many."""


class Allocations(PeakMemory):
    """The sizes of all storages that are larger than queries and keys of a group."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def _made(self, size):
        super()._made(size)
        if size > 2 * STREAM // HEADS:
            self.sizes.append(size)


def step(groups, **changes):
    own = attention("lsh", lsh={"chunk": 16, "rounds": 1, "buckets": 16, "shared_qk": False})
    own = own.model_copy(update={"head_groups": groups})
    settings = {"layers": 1, **changes, "d_model": WIDTH, "d_ff": 512, "heads": HEADS, "vocabulary": 128}
    tiles = {"feed_forward_tiles": 32, "loss_tiles": 32}
    rotary = {"kind": "rotary"}
    model = build_model(ModelConfig(max_length=LONG, attention=own, positions=rotary, **settings, **tiles), seed=0)
    tokens = random_tokens(1, LONG, 128)
    with Allocations() as memory, smaller_blocks(1 / 64):  # as a long sequence's are beside it
        model(tokens, training_draws(1))[0].backward()
    return memory


@pytest.mark.slow
def test_nothing_but_streams_is_larger_than_a_group_of_heads():
    """In a step, the embedding without its start and with it, two streams, and their gradients: six. Everything else is
    a group's, an eighth, or a tile. At the peak there are two streams, two gradients, and about two dozen tensors of a
    group. With all heads at once queries, keys and values are as large as a stream each."""
    whole, grouped = step(1), step(HEADS)
    assert len(grouped.sizes) == 6
    assert all(0.99 * STREAM < size <= STREAM for size in grouped.sizes)
    assert grouped.peak < 4 * STREAM + 24 * STREAM / HEADS
    assert len(whole.sizes) > 40
    assert whole.peak > 16 * STREAM


def test_streams_in_bf16_are_half_as_large():
    """Only the embedding and its gradient are fp32, before and after the streams exist."""
    grouped = step(HEADS, residual_dtype="bf16")
    assert sum(size > 0.51 * STREAM for size in grouped.sizes) <= 4
    assert grouped.peak < 2 * STREAM + 24 * STREAM / HEADS
