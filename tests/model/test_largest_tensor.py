"""The largest tensors of a training step in groups of heads: a hook on every allocation holds the promise."""

from megasparse.config.attention import LSHAttentionConfig
from megasparse.config.schema import ModelConfig
from megasparse.model.build import build_model
from megasparse.ops.blocks import smaller_blocks
from tests.helpers.models import attention, random_tokens, training_draws
from tests.helpers.peak_memory import PeakMemory

LENGTH, WIDTH, D_FF, HEADS = 2048, 64, 512, 8
STREAM = LENGTH * WIDTH * 4
"""Bytes of a stream; queries, keys or values of all heads in fp32 are as many."""


class Allocations(PeakMemory):
    """The sizes of all storages that are larger than queries and keys of a group."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def _count(self, storage, given):
        before = len(self._known)
        super()._count(storage, given)
        if len(self._known) > before and storage.nbytes() > 2 * STREAM // HEADS:
            self.sizes.append(storage.nbytes())


def step(groups, **changes):
    own = attention("lsh").model_copy(
        update={"lsh": LSHAttentionConfig(chunk=16, rounds=1, buckets=16, shared_qk=False), "head_groups": groups}
    )
    settings = {"layers": 1, **changes, "d_model": WIDTH, "d_ff": D_FF, "heads": HEADS, "vocabulary": 128}
    tiles = {"feed_forward_tiles": 32, "loss_tiles": 32}
    rotary = {"kind": "rotary"}
    model = build_model(ModelConfig(max_length=LENGTH, attention=own, positions=rotary, **settings, **tiles), seed=0)
    tokens = random_tokens(1, LENGTH, 128)
    with Allocations() as memory, smaller_blocks(1 / 64):  # as a long sequence's are beside it
        model(tokens, training_draws(1))[0].backward()
    return memory


def test_nothing_but_streams_is_larger_than_a_group_of_heads():
    """In a step, the embedding without its start and with it, two streams, and their gradients: six. Everything else is
    a group's, an eighth, or a tile. At the peak there are two streams, two gradients, and about two dozen tensors of a
    group. With all heads at once queries, keys and values are as large as a stream each.
    """
    whole, grouped = step(1), step(HEADS)
    assert len(grouped.sizes) == 6
    assert all(0.99 * STREAM < size <= STREAM for size in grouped.sizes)
    assert grouped.peak < 4 * STREAM + 24 * STREAM / HEADS
    assert len(whole.sizes) > 40
    assert whole.peak > 16 * STREAM


def test_streams_in_bf16_are_half_as_large():
    """The embedding alone is fp32, and so is its gradient, when the streams are not there yet, or no longer."""
    grouped = step(HEADS, residual_dtype="bf16")
    assert sum(size > 0.51 * STREAM for size in grouped.sizes) <= 4
    assert grouped.peak < 2 * STREAM + 24 * STREAM / HEADS
