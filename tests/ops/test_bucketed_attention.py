import itertools

import pytest
import torch
import torch.nn.functional as F

import megasparse.ops.bucketed_attention.layouts as layouts
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention
from megasparse.ops.bucketed_attention.blocks import bucketed_attention as blockwise
from megasparse.ops.bucketed_attention.definition import reference_attention as defined
from tests.helpers import operators
from tests.helpers.kernels import DEVICE
from tests.helpers.operators import as_views, assert_equal, assert_same_bits, assert_within_bars, random_masks

WINDOWS = [
    Window("band", 4),
    Window("band", 8),
    Window("chunk", 4),
    Window("chunk", 4, same_bucket=False),
    Window("chunk", 4, ahead=True),
    Window("chunk", 4, same_bucket=False, ahead=True),
]


def random_heads(length, batch=2, heads=2, dim=6, dtype=torch.float64, device="cpu", seed=0):
    return operators.random_heads(length, rows=(batch, heads), dim=dim, dtype=dtype, device=device, seed=seed)


def random_codes(length, rounds, buckets=3, batch=2, heads=2, seed=1, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, buckets, (batch, heads, rounds, length), generator=generator, dtype=torch.int16)
    return codes.to(device)


def call(attention, heads, codes, window, key_mask=None, segments=None, key_codes=None, dropout=None, **rule):
    dropped = {} if dropout is None else {"dropout": dropout}  # which kernels do not take
    return attention(*heads, codes, BucketedAttentionSpec(window, **rule), key_mask, segments, key_codes, **dropped)


def gradients(attention, heads, codes, window, **rule):
    return operators.gradients(lambda *heads: call(attention, heads, codes, window, **rule), heads)


def assert_equal_to_the_definition(heads, codes, window, **rule):
    ours, exact = (gradients(attention, heads, codes, window, **rule) for attention in (bucketed_attention, defined))
    assert_equal(ours, exact)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("length", [1, 29])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("exclude_self", [True, False], ids=["without itself", "with itself"])
@pytest.mark.parametrize(("rounds", "count_rounds"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize(("masked", "documents"), itertools.product([False, True], repeat=2))
def test_forward_and_gradients_are_those_of_the_definition(
    window, length, causal, exclude_self, rounds, count_rounds, masked, documents, monkeypatch
):
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


@SEPARATE
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [31, 33, 64, 65, 130])
def test_bands_of_any_width_are_those_of_the_definition(chunk, causal, separate, monkeypatch):
    """Tiles are as wide as the band up to 32, then 32 and above 64 tokens 64 wide."""
    monkeypatch.setattr(layouts, "SCORE_ELEMENTS", 30000)
    heads, codes = random_heads(200, batch=1), random_codes(200, 2, batch=1)
    rule = own_codes(separate, 200, 2, batch=1)
    assert_equal_to_the_definition(heads, codes, Window("band", chunk), causal=causal, **rule)


def test_slots_beyond_what_fp32_counts_to_are_distinct():
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


def test_one_bucket_and_a_full_window_is_full_attention():
    length = 40
    q, k, v = random_heads(length)
    codes = torch.zeros(2, 2, 1, length, dtype=torch.int64)
    seen = torch.ones(length, length, dtype=torch.bool).tril(-1)
    seen[0, 0] = True
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0)
    for window in (Window("band", length), Window("chunk", length)):
        out, _ = call(bucketed_attention, (q, k, v), codes, window, causal=True)
        torch.testing.assert_close(out, expected)


def test_identical_rounds_change_nothing():
    heads = random_heads(30)
    codes = random_codes(30, 1)
    once, lse = call(bucketed_attention, heads, codes, Window("band", 8), causal=True)
    twice, lse2 = call(bucketed_attention, heads, codes.repeat(1, 1, 3, 1), Window("band", 8), causal=True)
    torch.testing.assert_close(once, twice)
    torch.testing.assert_close(lse, lse2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [Window("band", 8), Window("chunk", 8)], ids=str)
def test_finite_in_hard_cases(window, causal):
    length = 33
    q, k, v = random_heads(length, dtype=torch.float32)
    cases = {
        "large": (q * 1e4, k, v),
        "zero": (q * 0, k * 0, v),
        "equal": (q[:, :, :1].expand_as(q), k[:, :, :1].expand_as(k), v),
        "denormal": (q * 1e-40, k * 1e-40, v),
    }
    for name, heads in cases.items():
        for codes in (torch.zeros(2, 2, 2, length, dtype=torch.int64), random_codes(length, 2, buckets=500)):
            exact = gradients(defined, [x.double() for x in heads], codes, window, causal=causal)
            ours = gradients(bucketed_attention, heads, codes, window, causal=causal)
            for a, b in zip(ours, exact, strict=True):
                assert torch.isfinite(b).all() and torch.isfinite(a).all(), name
                # fp32 knows a score of 1e5 to 1e-2, and so its exponential; all others to the usual bar.
                bar = 3e-2 if name == "large" else 1e-4
                torch.testing.assert_close(a.double(), b, rtol=bar, atol=bar * b.abs().max().item() + 1e-30)


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


def test_a_two_sided_band_and_one_bucket_see_both_sides_alike():
    """Turned round, the sequence has the turned outputs."""
    heads = random_heads(20)
    codes = torch.zeros(2, 2, 1, 20, dtype=torch.int64)
    out, _ = call(bucketed_attention, heads, codes, Window("band", 4), causal=False)
    turned, _ = call(bucketed_attention, [x.flip(2) for x in heads], codes, Window("band", 4), causal=False)
    torch.testing.assert_close(turned.flip(2), out)
