"""The kernels of bucketed attention in Triton's interpreter, against the dense definition."""

import itertools

import pytest
import torch

import megasparse.ops.bucketed_attention.gpu as kernels
from megasparse.attention.sinks import merge
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window
from megasparse.ops.bucketed_attention.gpu import NOWHERE, separate_intervals, shared_intervals
from tests.helpers import operators
from tests.helpers.definitions import bucketed_attention as defined
from tests.helpers.definitions import visible
from tests.helpers.operators import BARS, DEVICE, as_views, assert_same_bits, assert_within_bars
from tests.ops.test_bucketed_attention import call, gradients
from tests.ops.test_bucketed_attention import random_codes as codes_on

BAND, CHUNK = Window("band", 7), Window("chunk", 7)


def random_heads(length, batch=1, heads=1, dim=16, dtype=torch.float32, seed=0):
    return operators.random_heads(length, None, (batch, heads), dim, dtype, DEVICE, seed)


def random_codes(length, rounds, buckets=3, batch=1, heads=1, seed=1):
    return codes_on(length, rounds, buckets, batch, heads, seed, DEVICE)


def assert_as_defined(heads, codes, window, **rule):
    rule = {"scale": 0.6, **rule}
    exact = gradients(defined, [x.double() for x in heads], codes, window, **rule)
    assert_within_bars(gradients(kernels.bucketed_attention, heads, codes, window, **rule), exact, heads[0].dtype)


def masks_of(length, batch=1):
    return dict(zip(("key_mask", "segments"), operators.random_masks(length, batch, DEVICE), strict=True))


def some(count, quick):
    """`count` cases, of which the first `quick` are in `make test`."""
    return [pytest.param(i, marks=[] if i < quick else pytest.mark.kernels) for i in range(count)]


@pytest.mark.parametrize("seed", some(12, 4))
def test_shared_codes_are_as_defined(seed):
    """Every kind of window, both directions, rounds, masks and flags, each of them in several of the cases."""
    chunks = [[Window("chunk", 7, same_bucket=same, ahead=ahead) for same in (True, False)] for ahead in (False, True)]
    windows = [BAND, *chunks[0], BAND, *chunks[1]]
    causal, rounds = seed % 2 == 0, (1, 2, 3)[seed // 2 % 3]
    masks = masks_of(45) if seed % 3 == 0 else {}
    rule = {"causal": causal, "exclude_self": seed // 3 % 2 == 0, "count_rounds": seed % 5 != 0, **masks}
    heads, codes = random_heads(45, heads=1 + seed % 2), random_codes(45, rounds, heads=1 + seed % 2)
    assert_as_defined(heads, codes, windows[(seed + seed // 6) % 6], **rule)


def test_without_the_same_bucket_mask_positions_order_the_tokens():
    window = Window("chunk", 7, same_bucket=False)
    assert_as_defined(random_heads(30), random_codes(30, 1), window, causal=True, exclude_self=False)


@pytest.mark.parametrize("causal", [True, False])
def test_one_bucket_needs_no_order_and_masks_make_one(causal):
    heads = random_heads(45)
    window = Window("chunk", 16, ahead=not causal)
    assert_as_defined(heads, None, window, causal=causal, exclude_self=False)
    assert_as_defined(heads, None, window, causal=causal, exclude_self=False, **masks_of(45))


@pytest.mark.parametrize("seed", some(4, 2))
def test_separate_codes_are_as_defined(seed):
    codes = random_codes(45, 1 + seed % 2, buckets=(3, 40)[seed // 2])
    key_codes = random_codes(45, 1 + seed % 2, buckets=(3, 40)[seed // 2], seed=5)
    masks = masks_of(45) if seed % 3 == 0 else {}
    rule = {"causal": seed % 2 == 0, "exclude_self": seed > 1, "count_rounds": seed != 1, **masks}
    assert_as_defined(random_heads(45), codes, BAND, key_codes=key_codes, **rule)


@pytest.mark.parametrize("seed", some(8, 3))
def test_shares_merged_are_as_defined(seed):
    """Two shares, of two and of one block of queries; the bounds of others' queries stay ascending."""
    codes, key_codes = (random_codes(150, 1 + (seed + 1) % 2, seed=each) for each in (1, 5))
    window = (BAND, CHUNK, BAND, Window("chunk", 7, same_bucket=False))[seed % 4]
    rule = {"scale": 0.6, "causal": seed < 4, "exclude_self": seed % 3 == 0, "self_at_last": False}
    rule |= masks_of(150) if seed % 2 else {}
    rule |= {"key_codes": key_codes} if seed % 4 == 2 else {}
    heads = random_heads(150)

    def shares(*heads):
        each = ((number, 2) for number in range(2))
        return merge([call(kernels.bucketed_attention, heads, codes, window, pair_shard=one, **rule) for one in each])

    exact = gradients(defined, [x.double() for x in heads], codes, window, **rule)
    assert_within_bars(operators.gradients(shares, heads), exact, heads[0].dtype)
    if "key_codes" not in rule:
        spec = BucketedAttentionSpec(window, rule["causal"], buckets=3)
        found = shared_intervals(codes, heads[0], spec, rule.get("key_mask"), rule.get("segments"))
        for places in (range(0, 128), range(128, 150)):
            meets_whom_it_should(found.of_queries(places), 150)


def test_windows_far_apart_are_all_met():
    """One block of queries: a third in bucket 0, a third in one without keys, the rest in bucket 9, the keys' last."""
    length = 96
    third = torch.arange(length, device=DEVICE) % 3
    codes = (third * 4 + (third == 2)).expand(1, 1, 1, -1)  # 0, 4, 9
    key_codes = torch.full((1, 1, 1, length), 6, device=DEVICE)
    key_codes[..., :4], key_codes[..., 50:54] = 0, 9
    for causal in (True, False):
        assert_as_defined(random_heads(length), codes, BAND, key_codes=key_codes, causal=causal, exclude_self=False)


@pytest.mark.parametrize(
    "buckets,separate,dtype",  # every pair of values, by default every value
    [
        (2, True, torch.bfloat16),
        (20, False, torch.float32),
        (300, True, torch.float16),
        pytest.param(2, False, torch.float32, marks=pytest.mark.slow),
        pytest.param(2, False, torch.float16, marks=pytest.mark.slow),
        pytest.param(20, False, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(20, True, torch.float16, marks=pytest.mark.slow),
        pytest.param(300, True, torch.float32, marks=pytest.mark.slow),
        pytest.param(300, False, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_later_tokens_change_no_bit(buckets, separate, dtype):
    """Buckets of more keys than a tile, of fewer, and of one to three: later tokens move all of these."""
    length, window, rule = 250, Window("band", 70), {"causal": True, "scale": 0.6}
    heads, other = (random_heads(length, dtype=dtype, seed=seed) for seed in (0, 3))
    codes, key_codes, other_codes = (random_codes(length, 2, buckets, seed=seed) for seed in (1, 5, 7))

    def outputs(heads, codes, key_codes):
        return call(kernels.bucketed_attention, heads, codes, window, **rule, key_codes=key_codes if separate else None)

    whole = outputs(heads, codes, key_codes)
    for first in (61, 130, 249):
        changed = [torch.cat((x[:, :, :first], y[:, :, first:]), 2) for x, y in zip(heads, other, strict=True)]
        moved = [torch.cat((x[..., :first], other_codes[..., first:]), -1) for x in (codes, key_codes)]
        for a, b in zip(whole, outputs(changed, *moved), strict=True):
            assert torch.equal(a[:, :, :first], b[:, :, :first])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_within_its_bar(dtype):
    heads = random_heads(45, dim=24, dtype=dtype)
    assert_as_defined(heads, random_codes(45, 2, buckets=2).long(), Window("band", 20), causal=True)


def test_strided_inputs_are_read_without_a_copy():
    q, k, v = (x.requires_grad_() for x in as_views(random_heads(20, heads=2)))
    codes = random_codes(20, 2, heads=2).long().transpose(1, 2).contiguous().transpose(1, 2)
    for key_mask in (None, masks_of(40)["key_mask"][:, ::2]):
        rule = {"causal": True, "key_mask": key_mask}
        out, _ = call(kernels.bucketed_attention, (q, k, v), codes, BAND, **rule)
        assert out.transpose(1, 2).is_contiguous()
        ours = torch.autograd.grad(out.sum(), [q, k, v])  # whose gradient is one number, broadcast
        dense, _ = call(defined, [x.double() for x in (q, k, v)], codes, BAND, **rule)
        torch.testing.assert_close(out.double(), dense, rtol=1e-5, atol=1e-5)
        for a, b in zip(ours, torch.autograd.grad(dense.sum(), [q, k, v]), strict=True):
            assert (a - b).norm() <= 1e-4 * b.norm()


def test_heads_may_share_codes():
    heads, codes = random_heads(20, batch=2, heads=2), random_codes(20, 2, batch=2)
    both = (codes, codes.expand(-1, 2, -1, -1))
    assert_same_bits(*(gradients(kernels.bucketed_attention, heads, x, BAND, causal=True) for x in both))


HARD = [(1e4, 1.0), (1e4, 1e4), (0.0, 0.0), pytest.param(1e-40, 1e-40, marks=pytest.mark.kernels)]


@pytest.mark.parametrize("factor,k_factor", HARD)
def test_finite_in_hard_cases(factor, k_factor):
    q, k, v = random_heads(30)
    codes = random_codes(30, 2)
    for heads in ((q * factor, k * k_factor, v), (q[:, :, :1].expand_as(q) * factor, k[:, :, :1].expand_as(k), v)):
        exact = gradients(defined, [x.double() for x in heads], codes, BAND, causal=True)
        for a, b in zip(gradients(kernels.bucketed_attention, heads, codes, BAND, causal=True), exact, strict=True):
            assert torch.isfinite(a).all()
            if factor * k_factor < 1e8:  # there fp32 knows a score to 8
                bar = 3e-2 if factor > 1 else 1e-4
                torch.testing.assert_close(a.double(), b, rtol=bar, atol=bar * b.abs().max().item() + 1e-30)


def test_two_runs_are_the_same():
    heads, codes = random_heads(40), random_codes(40, 2)
    assert_same_bits(*(gradients(kernels.bucketed_attention, heads, codes, BAND, causal=True) for _ in range(2)))


@pytest.mark.parametrize("separate", [True, False])
def test_intervals_are_the_windows_of_the_definition(separate):
    """Counted from the bounds, in every round; and the keys' blocks meet all that see them."""
    length = 37
    codes, key_codes = (random_codes(length, 2, batch=2, heads=2, seed=seed) for seed in (1, 5))
    like = torch.empty(2, 2, length, 4, device=DEVICE)
    for window, causal, masks in itertools.product((BAND, CHUNK), (True, False), ({}, masks_of(length, 2))):
        if separate and window is CHUNK:
            continue
        both = (masks.get("key_mask"), masks.get("segments"))
        spec = BucketedAttentionSpec(window, causal, exclude_self=False, buckets=3)
        if separate:
            found = separate_intervals(codes, key_codes, spec, *both)
        else:
            found = shared_intervals(codes, like, spec, *both)
        place = found.token_index[..., None, :]
        ours = (place >= found.token_low[..., None]) & (place < found.token_high[..., None])
        seen = visible(codes, window, causal, *both, *([key_codes] if separate else []))
        assert torch.equal(ours, seen.flatten(0, 1))
        meets_whom_it_should(found, length)


def meets_whom_it_should(found, length):
    low, high = found.low, found.high
    assert (low.diff() >= 0).all() and ((high.diff() >= 0) | (high[..., 1:] == NOWHERE)).all()
    first, end = found.meeting(8)
    for block in range(first.shape[-1]):
        keys = torch.arange(block * 8, min(length, block * 8 + 8), device=DEVICE)
        meets = ((keys >= low[..., None]) & (keys < high[..., None])).any(-1)
        queries = torch.arange(length, device=DEVICE)
        assert not (meets & ((queries < first[..., block, None]) | (queries >= end[..., block, None]))).any()


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", list(BARS), ids=str)
@pytest.mark.parametrize("dim", [16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("length", [1, 17, 100])
def test_every_shape_is_within_its_bar(length, dim, dtype):
    heads = random_heads(length, dim=dim, dtype=dtype)
    codes, scale = random_codes(length, 2, buckets=4), dim**-0.5
    assert_as_defined(heads, codes, Window("band", 20), causal=True, scale=scale)
    assert_as_defined(heads, None, Window("chunk", 20, ahead=True), causal=False, exclude_self=False, scale=scale)
    key_codes = random_codes(length, 2, buckets=4, seed=5)
    assert_as_defined(heads, codes, Window("band", 20), causal=False, key_codes=key_codes, scale=scale)
