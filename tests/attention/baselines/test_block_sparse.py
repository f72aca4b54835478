"""Sparse Transformer, Longformer and BigBird: the pairs that are visible, one by one, and a dense softmax over them."""

import itertools

import pytest
import torch

from megasparse.attention.baselines.bigbird import random_blocks
from megasparse.attention.contract import MechanismSpec
from megasparse.config.attention import MECHANISMS, AttentionConfig
from megasparse.ops.random import derive
from tests.helpers.comparing import assert_same_with_gradients, softmax_over
from tests.helpers.models import Single

BOTH = pytest.mark.parametrize("causal", [True, False])
SETTINGS = [
    ("sparse_transformer", {"stride": 4}),
    ("sparse_transformer", {"stride": 100}),
    ("sparse_transformer", {}),
    ("longformer", {"chunk": 4, "globals": 0}),
    ("longformer", {"chunk": 4, "globals": 18}),
    ("longformer", {"chunk": 1000, "globals": 2}),
    ("bigbird", {"chunk": 3, "globals": 0, "random": 1}),
    ("bigbird", {"chunk": 2, "globals": 2, "random": 40}),
]
EVERY = pytest.mark.parametrize("kind,settings", SETTINGS, ids=str)


def build(kind, causal, settings, max_length=40):
    single = Single(kind, causal)
    section = getattr(AttentionConfig.model_validate({kind: settings}), kind)
    place = MechanismSpec(heads=2, head_dim=16, d_model=32, max_length=max_length, causal=causal)
    single.mechanism = MECHANISMS[kind](section, place)
    return single


def sees(kind, settings, i, j, causal, drawn, max_length=40):
    """Whether i sees j in a sequence of one document. drawn: of a block, its random blocks."""
    if causal and j > i:
        return False
    if kind == "sparse_transformer":
        stride = settings.get("stride", round(max_length**0.5))
        return abs(i - j) < stride or (i - j) % stride == 0
    chunk = min(settings["chunk"], max_length)
    first = settings["globals"] * (chunk if kind == "bigbird" else 1)
    near = abs(i // chunk - j // chunk) <= 1
    return near or j < first or (not causal and i < first) or (kind == "bigbird" and j // chunk in drawn[i // chunk])


def drawn_blocks(settings, causal, max_length=40):
    """By head and block, from a function that is tested separately."""
    if "random" not in settings:
        return [{}, {}]
    chunk = min(settings["chunk"], max_length)
    total = -(-max_length // chunk)
    key = derive(0, 0, "bigbird blocks")
    numbers = settings["globals"], None if causal else total, settings["random"]
    return random_blocks(torch.arange(total), key, range(2), *numbers).tolist()


def pattern(kind, settings, causal, length):
    """(2, L, L) bool: whether head h shows j to i."""
    drawn, tokens = drawn_blocks(settings, causal), range(length)
    table = [[[sees(kind, settings, i, j, causal, drawn[h]) for j in tokens] for i in tokens] for h in range(2)]
    return torch.tensor(table)


def dense(shown, q, k, v, mask, segments):
    """Positions are counted from the first real token of the document where there are documents."""
    seen = torch.zeros(len(q), *shown.shape, dtype=torch.bool)
    for b in range(len(q)):
        for document in segments[b].unique():
            tokens = ((segments[b] == document) & mask[b]).nonzero().squeeze(-1)
            seen[b][:, tokens[:, None], tokens] = shown[:, : len(tokens), : len(tokens)]
    return softmax_over(q @ k.transpose(-1, -2) / 4, seen, v)


@BOTH
@EVERY
def test_forward_and_gradients_equal_the_definition(kind, settings, causal):
    single, length = build(kind, causal, settings), 23
    shown = pattern(kind, settings, causal, length)
    x, *heads = single.inputs(length, dtype=torch.float64)
    everything = torch.ones(2, length, dtype=torch.bool)
    mask, segments = everything.clone(), torch.zeros(2, length, dtype=torch.int64)
    mask[0, 15:] = False
    packed = segments.clone()
    packed[:, 9:] = 1
    for given in ({}, {"key_mask": mask}, {"key_mask": mask, "segments": packed}):
        rule = given.get("key_mask", everything), given.get("segments", segments)
        assert_same_with_gradients(
            lambda *h, given=given: single(x, *h, **given).out, lambda *h, rule=rule: dense(shown, *h, *rule), heads
        )


def test_random_blocks_are_different_candidates():
    for total, global_blocks, count in itertools.product([None, 12], [0, 5, 20], [1, 3, 30]):
        table = random_blocks(torch.arange(12), 7, range(4), global_blocks, total, count)
        assert table.shape == (4, 12, count)
        for h, w in itertools.product(range(4), range(12)):
            candidates = {b for b in range(global_blocks, 12 if total else w) if abs(b - w) > 1}
            chosen = [b for b in table[h, w].tolist() if b >= 0]
            assert len(chosen) == len(set(chosen)) == min(count, len(candidates))
            assert set(chosen) <= candidates


def test_random_blocks_are_uniform_and_depend_on_the_global_head_and_block():
    table = random_blocks(torch.arange(12), 7, range(4000), 1, 12, 3)
    counts = torch.bincount(table[:, 5].flatten(), minlength=12)
    candidates = [1, 2, 3, 7, 8, 9, 10, 11]
    assert counts.sum() == counts[candidates].sum() == 12000
    share = 3 / 8  # of the heads have a given block
    assert (counts[candidates] - 4000 * share).abs().max() < 5 * (4000 * share * (1 - share)) ** 0.5
    part = random_blocks(torch.arange(4, 6), 7, range(2, 4), 1, 12, 3)
    assert torch.equal(part, table[2:4, 4:6])
    assert not torch.equal(random_blocks(torch.arange(12), 8, range(4000), 1, 12, 3), table)


def test_bigbird_keeps_its_pattern_over_the_steps():
    single = build("bigbird", True, {"chunk": 3, "globals": 0, "random": 1})
    inputs = single.inputs(40)
    first = single(*inputs, training=True, step=0).out
    torch.testing.assert_close(single(*inputs, training=True, step=5).out, first, rtol=0, atol=0)
    other = single(*inputs, training=True, head_offset=1).out
    assert not torch.allclose(other[:, 0], first[:, 0])
