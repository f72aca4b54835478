"""Bands where queries and keys have buckets of their own, against the definition, and the work that their tiles do."""

import itertools

import pytest
import torch

import megasparse.ops.bucketed_attention.layouts as layouts
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window
from megasparse.ops.bucketed_attention.blocks import bucketed_attention as blockwise
from megasparse.ops.random import PairDropout
from tests.helpers.operators import assert_same_bits, random_masks
from tests.ops.test_bucketed_attention import assert_equal_to_the_definition, gradients, random_codes, random_heads


@pytest.fixture(params=[70, 1000, 1 << 18], ids="{} scores".format)
def _block(request, monkeypatch):
    """Several blocks a row, several rows a block, or one block."""
    monkeypatch.setattr(layouts, "SCORE_ELEMENTS", request.param)


@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("length", [1, 29])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize(("rounds", "count_rounds"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize(("masked", "documents"), itertools.product([False, True], repeat=2))
def test_forward_and_gradients_are_those_of_the_definition(length, causal, rounds, count_rounds, masked, documents):
    mask, segments = random_masks(length)
    dropout = PairDropout.of(0.3, 7, torch.arange(length).expand(2, -1), range(2))
    for number, chunk in enumerate((1, 4, 8)):
        assert_equal_to_the_definition(
            random_heads(length), random_codes(length, rounds), Window("band", chunk),
            causal=causal, scale=0.7, exclude_self=number == 1, self_at_last=number != 2, count_rounds=count_rounds,
            key_codes=random_codes(length, rounds, seed=5), dropout=dropout if number else None,
            key_mask=mask if masked else None, segments=segments if documents else None,
        )  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
def test_buckets_that_only_queries_or_only_keys_are_in(causal):
    heads, one = random_heads(80, batch=1), torch.zeros(1, 2, 1, 80, dtype=torch.int64)
    many = torch.arange(80).expand(1, 2, 1, -1)
    for queries, keys in (
        (one, one),
        (one, one + 1),
        (many, one),
        (one, many),
        (many, many.flip(-1)),
        (many, 2 * many),
    ):
        rule = {"causal": causal, "exclude_self": False, "key_codes": keys}
        assert_equal_to_the_definition(heads, queries, Window("band", 8), **rule)


@pytest.mark.usefixtures("_block")
def test_codes_that_all_heads_share():
    heads, (codes, keys) = random_heads(29), (random_codes(29, 2, seed=seed)[:, :1] for seed in (0, 5))
    mask, _ = random_masks(29)
    assert_equal_to_the_definition(heads, codes, Window("band", 4), causal=True, key_codes=keys, key_mask=mask)


def test_keys_that_are_not_finite_move_no_tile_that_does_not_see_them():
    """Padding and other heads are in no tile's run of keys."""
    heads, codes = random_heads(40, dtype=torch.float32), random_codes(40, 2)
    mask = torch.arange(40).expand(2, -1) < 33
    rule = {"causal": True, "exclude_self": False, "key_codes": random_codes(40, 2, seed=5), "key_mask": mask}
    clean = gradients(blockwise, heads, codes, Window("band", 8), **rule)
    dirty = [x.clone() for x in heads]
    for x in dirty[1:]:
        x[:, :, 33:] = torch.nan
    dirty[1][1, 1] = torch.nan
    found = gradients(blockwise, dirty, codes, Window("band", 8), **rule)
    for before, after in zip(clean, found, strict=True):
        assert_same_bits([before[0], before[1, 0]], [after[0], after[1, 0]])


@pytest.mark.parametrize("buckets", [1, 16, 700])
@pytest.mark.parametrize("spread", ["alike", "one bucket of queries", "one bucket of keys"])
def test_the_pairs_of_all_tiles_are_linear_in_length(buckets, spread):
    """Scores are T times the keys of all runs: at most L + W·⌈L / T⌉, whatever the buckets."""
    length, band, tile = 4096, 64, 32
    queries, keys = (random_codes(length, 1, buckets, batch=1, heads=1, seed=seed) for seed in (1, 5))
    if spread != "alike":
        (queries if spread == "one bucket of queries" else keys).zero_()
    spec = BucketedAttentionSpec(Window("band", band), causal=True, exclude_self=False)
    layout = layouts.RangeLayout.of(queries, keys, spec, None, None)
    (rows,) = layouts.row_groups(layout, *random_heads(length, batch=1, heads=1, dim=2), spec, None)
    round_ = layouts.RangeRound(rows, 0)
    assert round_.queries.shape == (length // tile, tile)
    runs, most = round_.end - round_.first, length + band * length // tile
    assert int(runs.min()) >= 0 and int(runs.sum()) <= most
    assert sum(block.key_tokens.numel() for block in rows.layout.blocks(rows)) <= 1.25 * most, (
        "runs of a block differ much"
    )
