"""Shares of the pairs of bucketed attention, merged: the whole, whoever does which."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megasparse.attention.sinks import merge
from megasparse.ops.bucketed_attention import Window
from megasparse.ops.bucketed_attention.blocks import bucketed_attention as blockwise
from megasparse.ops.bucketed_attention.definition import reference_attention as defined
from megasparse.ops.random import PairDropout
from tests.helpers import operators
from tests.helpers.operators import assert_equal, random_masks
from tests.ops.test_bucketed_attention import WINDOWS, call, random_codes, random_heads

LENGTH = 150  # three blocks of sorted places


def merged(attention, shares, codes, window, dropout=None, **rule):
    """Of q, k and v."""

    def attend(*heads):
        alone = {**rule, "self_at_last": False, "dropout": dropout}
        return merge([call(attention, heads, codes, window, share=(g, shares), **alone) for g in range(shares)])

    return attend


def check(heads, codes, window, shares, dropout=None, **rule):
    exact = operators.gradients(
        lambda *heads: call(defined, heads, codes, window, self_at_last=False, dropout=dropout, **rule), heads
    )
    for attention in (blockwise, defined):
        assert_equal(operators.gradients(merged(attention, shares, codes, window, dropout, **rule), heads), exact)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_shares_of_shared_codes_are_the_whole(window, causal):
    mask, segments = random_masks(LENGTH, batch=1)
    for number, (rounds, masked) in enumerate(itertools.product((1, 3), (False, True))):
        check(
            random_heads(LENGTH, batch=1), random_codes(LENGTH, rounds, batch=1), window, 2 + number % 2,
            causal=causal, scale=0.7, exclude_self=number > 1, count_rounds=number != 2,
            key_mask=mask if masked else None, segments=segments if masked else None,
        )  # fmt: skip


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_shares_of_separate_codes_are_the_whole(causal):
    mask, segments = random_masks(LENGTH, batch=1)
    codes, key_codes = (random_codes(LENGTH, 2, batch=1, seed=seed) for seed in (1, 5))
    for masks in ({}, {"key_mask": mask, "segments": segments}):
        rule = {"causal": causal, "exclude_self": False, "key_codes": key_codes, **masks}
        check(random_heads(LENGTH, batch=1), codes, Window("band", 4), 3, **rule)


def test_shares_of_dropped_probabilities_are_the_whole():
    dropout = PairDropout.of(0.3, 7, torch.arange(LENGTH)[None], range(2))
    codes, key_codes = (random_codes(LENGTH, 2, batch=1, seed=seed) for seed in (1, 5))
    for own in (None, key_codes):
        heads = random_heads(LENGTH, batch=1)
        check(heads, codes, Window("band", 4), 2, dropout, causal=True, exclude_self=False, key_codes=own)


@pytest.mark.parametrize("window", [Window("band", 32), Window("chunk", 32, ahead=True)], ids=str)
def test_each_share_is_a_part_of_the_work(window):
    """Of 16 tiles of 32 places a quarter each."""
    heads, codes = random_heads(512, batch=1, heads=1, dtype=torch.float32), random_codes(512, 2, batch=1, heads=1)

    def flops(share):
        leaves = [x.clone().requires_grad_() for x in heads]
        with FlopCounterMode(display=False) as counter:
            rule = {"causal": window.kind == "band", "self_at_last": False}
            out, lse = call(blockwise, leaves, codes, window, share=share, **rule)
            (out.sum() + lse.clamp_min(0.0).sum()).backward()
        return counter.get_total_flops()

    whole = flops(None)
    assert whole > 0 and [4 * flops((number, 4)) for number in range(4)] == [whole] * 4
