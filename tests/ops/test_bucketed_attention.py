"""Bucketed attention in blocks, of shared and of separate codes, against its definition; its shares; key windows."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import megasparse.ops.bucketed_attention.layouts as layouts
from megasparse.attention.sinks import merge
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention
from megasparse.ops.bucketed_attention.blocks import bucketed_attention as blockwise
from megasparse.ops.bucketed_attention.blocks import row_groups
from megasparse.ops.random import PairDropout
from tests.helpers import operators
from tests.helpers.definitions import bucketed_attention as defined
from tests.helpers.operators import DEVICE, as_views, assert_equal, assert_same_bits, assert_within_bars, random_masks

WINDOWS = [Window("band", 4), Window("band", 8)]
WINDOWS += [Window("chunk", 4, same_bucket=same, ahead=ahead) for ahead in (False, True) for same in (True, False)]


def random_heads(length, batch=2, heads=2, dim=6, dtype=torch.float64, device="cpu", seed=0):
    return operators.random_heads(length, rows=(batch, heads), dim=dim, dtype=dtype, device=device, seed=seed)


def random_codes(length, rounds, buckets=3, batch=2, heads=2, seed=1, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, buckets, (batch, heads, rounds, length), generator=generator, dtype=torch.int16)
    return codes.to(device)


def call(attention, heads, codes, window, key_mask=None, segments=None, key_codes=None, dropout=None, **rule):
    dropped = {} if dropout is None else {"dropout": dropout}  # which kernels do not take
    codes = codes if key_codes is None else (codes, key_codes)
    return attention(*heads, codes, BucketedAttentionSpec(window, **rule), key_mask, segments, **dropped)


def gradients(attention, heads, codes, window, **rule):
    return operators.gradients(lambda *heads: call(attention, heads, codes, window, **rule), heads)


def assert_equal_to_the_definition(heads, codes, window, **rule):
    ours, exact = (gradients(attention, heads, codes, window, **rule) for attention in (bucketed_attention, defined))
    assert_equal(ours, exact)


def some(grid, stride):
    """Every stride-th case: with these strides any two values of two axes meet in one. As many others are slow."""
    return [*grid[::stride], *(pytest.param(*case, marks=pytest.mark.slow) for case in grid[stride // 2 :: stride])]


BOOLS, COUNTS = (True, False), [(1, True), (3, True), (3, False)]
GRID = list(itertools.product(WINDOWS, (1, 29), BOOLS, BOOLS, COUNTS, BOOLS, BOOLS))


@pytest.mark.parametrize("window,length,causal,exclude_self,counts,masked,documents", some(GRID, 17))
def test_forward_and_gradients_equal_the_definition(
    window, length, causal, exclude_self, counts, masked, documents, monkeypatch
):
    rounds, count_rounds = counts
    monkeypatch.setattr(layouts, "_LAYOUT_ELEMENTS", 3 * length)  # heads are laid out one at a time
    # Several blocks a row, several rows a block, or one block.
    size = (70, 1000, 1 << 18)[(causal + masked + 2 * exclude_self + documents) % 3]
    monkeypatch.setattr(layouts, "SCORE_ELEMENTS", size)
    mask, segments = random_masks(length)
    assert_equal_to_the_definition(
        random_heads(length), random_codes(length, rounds), window,
        causal=causal, scale=0.7, exclude_self=exclude_self, count_rounds=count_rounds,
        key_mask=mask if masked else None, segments=segments if documents else None,
    )  # fmt: skip


SEPARATE = pytest.mark.parametrize("separate", [False, True], ids=["shared codes", "separate codes"])


def own_codes(separate, length, rounds, **settings):
    """The rule of keys that have codes of their own, or none."""
    own = {"exclude_self": False, "key_codes": random_codes(length, rounds, seed=5, **settings)}
    return own if separate else {}


@pytest.mark.parametrize(
    "chunk,causal,separate",
    [(31, True, False), (31, False, True), (33, False, False), (64, True, True), (65, False, True), (130, True, False)],
)
def test_bands_of_any_width_equal_the_definition(chunk, causal, separate, monkeypatch):
    """Tiles are as wide as the band up to 32, then 32 and above 64 tokens 64 wide."""
    monkeypatch.setattr(layouts, "SCORE_ELEMENTS", 30000)
    heads, codes = random_heads(200, batch=1), random_codes(200, 2, batch=1)
    rule = own_codes(separate, 200, 2, batch=1)
    assert_equal_to_the_definition(heads, codes, Window("band", chunk), causal=causal, **rule)


def test_slots_above_the_integers_of_fp32_are_distinct():
    """The last bucket of half a million others: its tokens' slots are above 2^24, and the window cuts it."""
    length, last = 530_000, 100
    heads = random_heads(length, batch=1, heads=1, dim=2, dtype=torch.float32)
    codes = torch.arange(length).clamp_max(length - last)
    out, lse = call(blockwise, heads, codes[None, None, None], Window("band", 32), causal=True)
    alone = call(blockwise, [x[:, :, -last:] for x in heads], None, Window("band", 32), causal=True)
    torch.testing.assert_close(out[:, :, -last:], alone[0])
    torch.testing.assert_close(lse[:, :, -last:], alone[1])


@SEPARATE
def test_heads_that_are_views_give_the_same_bits(separate):
    heads, codes, window = random_heads(40, dtype=torch.float32), random_codes(40, 2), Window("band", 8)
    rule = {"causal": True, **own_codes(separate, 40, 2)}
    assert_same_bits(*(gradients(blockwise, x, codes, window, **rule) for x in (heads, as_views(heads))))


@pytest.mark.parametrize(
    ("dtype", "length", "rounds", "buckets", "separate"),
    [
        (torch.float32, 500, 4, 20, False),
        (torch.bfloat16, 200, 2, 10, False),
        (torch.float32, 500, 2, 20, True),
        (torch.bfloat16, 500, 2, 20, True),
    ],
)
def test_each_dtype_is_within_its_bar_of_the_definition(dtype, length, rounds, buckets, separate):
    heads, codes = random_heads(length, dim=32, dtype=dtype), random_codes(length, rounds, buckets)
    rule = {"causal": True, **own_codes(separate, length, rounds, buckets=buckets)}
    exact = gradients(defined, [x.double() for x in heads], codes, Window("band", 32), **rule)
    assert_within_bars(gradients(bucketed_attention, heads, codes, Window("band", 32), **rule), exact, dtype)


@pytest.mark.usefixtures("implementation")
def test_a_nan_stays_in_its_own_sequence_and_is_not_hidden():
    heads = random_heads(20, batch=3, heads=1, dim=16, dtype=torch.float32, device=DEVICE)
    codes = random_codes(20, 2, batch=3, heads=1, device=DEVICE)
    clean = gradients(bucketed_attention, heads, codes, Window("band", 4), causal=True)
    heads[0][1] = torch.nan
    dirty = gradients(bucketed_attention, heads, codes, Window("band", 4), causal=True)
    assert_same_bits([x[[0, 2]] for x in clean], [x[[0, 2]] for x in dirty])
    lonely = clean[0][1] == heads[2][1]
    assert dirty[0][1][~lonely].isnan().all()


SEPARATE_GRID = list(itertools.product((70, 1000, 1 << 18), (1, 29), BOOLS, COUNTS, BOOLS, BOOLS))


@pytest.mark.parametrize("block,length,causal,counts,masked,documents", some(SEPARATE_GRID, 7))
def test_separate_codes_equal_the_definition(block, length, causal, counts, masked, documents, monkeypatch):
    monkeypatch.setattr(layouts, "SCORE_ELEMENTS", block)
    rounds, count_rounds = counts
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
    for queries, keys in ((one, one), (one, one + 1), (many, one), (one, many), (many, 79 - many), (many, 2 * many)):
        rule = {"causal": causal, "exclude_self": False, "key_codes": keys}
        assert_equal_to_the_definition(heads, queries, Window("band", 8), **rule)


@pytest.mark.parametrize("causal", [True, False])
def test_keys_that_are_not_finite_move_no_tile_that_does_not_see_them(causal):
    """Padding and other heads are in no tile's run of keys, nor in a tile without keys."""
    heads, codes = random_heads(40, dtype=torch.float32), random_codes(40, 2)
    codes[..., 5:25], mask = 0, torch.arange(40).expand(2, -1) < 33
    rule = {"causal": causal, "exclude_self": False, "key_codes": random_codes(40, 2, seed=5) + 1, "key_mask": mask}
    clean = gradients(blockwise, heads, codes, Window("band", 8), **rule)
    dirty = [x.clone() for x in heads]
    for x in dirty[1:]:
        x[:, :, 33:] = torch.nan
    dirty[1][1, 1] = torch.nan
    for before, after in zip(clean, gradients(blockwise, dirty, codes, Window("band", 8), **rule), strict=True):
        assert_same_bits([before[0], before[1, 0]], [after[0], after[1, 0]])


@pytest.mark.parametrize("spread", ["alike", "one bucket of queries", "one bucket of keys"])
def test_the_pairs_of_all_tiles_are_linear_in_length(spread):
    """Runs of keys: at most L + W·⌈L / T⌉ keys, whatever the buckets, where attention is not causal. Where it is, T
    queries have the keys of their ranks, and a bucket's tiles are half full at least but for the first one."""
    length, band, tile = 4096, 64, 32
    heads = random_heads(length, batch=1, heads=1, dim=2)
    for buckets, causal in itertools.product((1, 16, 700), BOOLS):
        queries, keys = (random_codes(length, 1, buckets, batch=1, heads=1, seed=seed) for seed in (1, 5))
        if spread != "alike":
            (queries if spread == "one bucket of queries" else keys).zero_()
        spec = BucketedAttentionSpec(Window("band", band), causal, exclude_self=False, buckets=buckets)
        layout = layouts.RangeLayout.of(queries, keys, spec, None, None)
        (rows,) = row_groups(layout, *heads, spec, False, None)
        pairs = sum(block.query_tokens.numel() * block.key_tokens.shape[1] for block in layout.blocks(rows))
        assert pairs <= (2 if causal else 1.25) * tile * (length + 2 * band * length // tile)


SHARED_LENGTH = 150  # three blocks of sorted places


def merged(attention, shares, codes, window, dropout=None, **rule):
    """Of q, k and v."""

    def attend(*heads):
        alone = {**rule, "self_at_last": False, "dropout": dropout}
        return merge([call(attention, heads, codes, window, pair_shard=(g, shares), **alone) for g in range(shares)])

    return attend


def check(heads, codes, window, shares, dropout=None, **rule):
    exact = gradients(defined, heads, codes, window, self_at_last=False, dropout=dropout, **rule)
    for attention in (blockwise, defined):
        assert_equal(operators.gradients(merged(attention, shares, codes, window, dropout, **rule), heads), exact)


@pytest.mark.parametrize(
    "window,causal", list(zip(WINDOWS, [True, False, True, True, False, False], strict=True)), ids=str
)
def test_shares_of_shared_codes_are_the_whole(window, causal):
    mask, segments = random_masks(SHARED_LENGTH, batch=1)
    for number, (rounds, masked) in enumerate(itertools.product((1, 3), (False, True))):
        check(
            random_heads(SHARED_LENGTH, batch=1), random_codes(SHARED_LENGTH, rounds, batch=1), window, 2 + number % 2,
            causal=causal, scale=0.7, exclude_self=number > 1, count_rounds=number != 2,
            key_mask=mask if masked else None, segments=segments if masked else None,
        )  # fmt: skip


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_shares_of_separate_codes_and_of_dropped_probabilities_are_the_whole(causal):
    mask, segments = random_masks(SHARED_LENGTH, batch=1)
    dropout = PairDropout.of(0.3, 7, torch.arange(SHARED_LENGTH)[None], range(2))
    codes, separate = (random_codes(SHARED_LENGTH, 2, batch=1, seed=seed) for seed in (1, 5))
    masks = {"key_mask": mask, "segments": segments}
    cases = ((separate, {}, None), (separate, masks, None), (separate, {}, dropout), (None, {}, dropout))
    for key_codes, more, dropped in cases:
        rule = {"causal": causal, "exclude_self": False, "key_codes": key_codes, **more}
        check(random_heads(SHARED_LENGTH, batch=1), codes, Window("band", 4), 3, dropped, **rule)


@pytest.mark.parametrize("window", [Window("band", 32), Window("chunk", 32, ahead=True)], ids=str)
def test_each_share_is_a_part_of_the_work(window):
    """A quarter each of chunks; of causal bands, whose tiles the share's queries fill in part, about a quarter."""
    length = 4096 if window.kind == "band" else 512
    heads = random_heads(length, batch=1, heads=1, dtype=torch.float32)
    codes = random_codes(length, 2, batch=1, heads=1)

    def flops(share):
        leaves = [x.clone().requires_grad_() for x in heads]
        with FlopCounterMode(display=False) as counter:
            rule = {"causal": window.kind == "band", "self_at_last": False}
            out, lse = call(blockwise, leaves, codes, window, pair_shard=share, **rule)
            (out.sum() + lse.clamp_min(0.0).sum()).backward()
        return counter.get_total_flops()

    whole, parts = flops(None), [flops((number, 4)) for number in range(4)]
    assert whole > 0
    if window.kind == "band":
        assert max(parts) < 0.3 * whole
    else:
        assert [4 * part for part in parts] == [whole] * 4
