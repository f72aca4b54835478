import pytest
import torch

import megasparse.ops.gathered_attention as module
from megasparse.ops.gathered_attention import gathered_attention
from tests.helpers import operators
from tests.helpers.definitions import gathered_attention as reference
from tests.helpers.operators import (
    BARS,
    DEVICE,
    as_views,
    assert_equal,
    assert_same_bits,
    assert_within_bars,
    random_heads,
)


def random_index(queries, keys, places, rows=(2, 3), seed=1, device=DEVICE):
    """Some places empty, some rows empty, some keys named twice, the first key by about a third."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, keys, (*rows, queries, places), generator=generator)
    index = index.masked_fill(torch.rand(index.shape, generator=generator) < 0.3, 0)
    return index.masked_fill(torch.rand(*rows, queries, 1, generator=generator) < 0.2, -1).to(device)


def fp32_heads(queries, keys=None, rows=(1, 1), dim=16, dtype=torch.float32):
    return random_heads(queries, keys, rows, dim, dtype, DEVICE)


def gradients(attention, heads, index, scale=0.3):
    return operators.gradients(lambda *heads: attention(*heads, index, scale=scale), heads)


def check(heads, index):
    exact = gradients(reference, [x.double() for x in heads], index)
    assert_within_bars(gradients(gathered_attention, heads, index), exact, heads[0].dtype, floor=1e-6)


@pytest.mark.parametrize("queries,keys,places", [(1, 9, 30), (17, 17, 1), (13, 6, 30)])
def test_blocks_are_the_definition(queries, keys, places, monkeypatch):
    monkeypatch.setattr(module, "_GATHERED_ELEMENTS", 7 * 5 * places)  # several blocks, some across heads
    heads = random_heads(queries, keys, (2, 3), 5)
    for rows in ((2, 3), (1, 3), (2, 1), (1, 1)):
        index = random_index(queries, keys, places, rows, device="cpu")
        for dtype in (torch.int32, torch.int64):
            assert_equal(gradients(gathered_attention, heads, index.to(dtype)), gradients(reference, heads, index))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("groups", "lists"), [(1, 4), (4, 2), (2, 1)])
def test_heads_share_keys_and_indices(groups, lists):
    """Also keys in a cache with spare capacity."""
    q, k, v = fp32_heads(5, 7, (2, 4))
    k, v, index = k[:, :groups], v[:, :groups, :6], random_index(5, 6, 3, (2, lists)).to(torch.int32)
    for keys in (k[:, :, :6], k[:, :, 1:].contiguous()):
        check((q, keys, v), index)
        for enabled in (True, False):  # without gradients in one block
            with torch.set_grad_enabled(enabled):
                torch.testing.assert_close(*(f(q, keys, v, index, scale=0.3) for f in (gathered_attention, reference)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_within_the_bars_of_a_dtype(dtype):
    check(random_heads(300, rows=(2, 3), dim=32, dtype=dtype), random_index(300, 300, 20, device="cpu"))


@pytest.mark.parametrize(
    "queries,keys,places,rows",
    [(1, 1, 1, (2, 2)), (9, 6, 9, (2, 1)), pytest.param(5, 20, 30, (1, 1), marks=pytest.mark.kernels)],
)
def test_kernels_are_the_definition(queries, keys, places, rows, kernels):
    check(fp32_heads(queries, keys, (2, 2)), random_index(queries, keys, places, rows).to(torch.int32))


def test_kernels_in_bf16_at_a_head_dim_between_powers_of_two(kernels):
    check(fp32_heads(9, 13, (1, 2), 40, torch.bfloat16), random_index(9, 13, 5, (1, 2)))


def test_kernels_add_up_a_key_that_all_choose_over_many_tiles(kernels):
    """The first has more tiles of entries than one step of `join_tiles` takes, the next ones end or start in a tile."""
    index = torch.zeros(1, 1, 24, 30, dtype=torch.int64, device=DEVICE)
    index[:, :, 12:] = torch.arange(30, device=DEVICE) // 5
    index[:, :, 20:, 3:] = -1
    check(fp32_heads(24, 12), index)


def test_kernels_read_views_and_broadcast_gradients(kernels):
    heads, index = as_views(fp32_heads(5, 7, (1, 2))), random_index(5, 7, 4, (1, 2))
    assert not heads[0].is_contiguous()
    check(heads, index)
    check([x.mT.contiguous().mT for x in heads], index.mT.contiguous().mT)
    one, other = (lambda *x, f=f: f(*x, index, scale=0.3) for f in (gathered_attention, reference))
    operators.assert_gradients_of_one_output_alone(one, other, heads)


@pytest.mark.usefixtures("implementation")
def test_a_query_without_keys_gets_zero_and_gives_no_gradient():
    heads, index = fp32_heads(6), random_index(6, 6, 3, (1, 1))
    index[:, :, 2] = -1
    out, lse, dq, *_ = gradients(gathered_attention, heads, index)
    assert (out[:, :, 2] == 0).all() and (lse[:, :, 2] == -torch.inf).all() and (dq[:, :, 2] == 0).all()
    out, lse, *grads = gradients(gathered_attention, heads, torch.full_like(index, -1))
    assert (lse == -torch.inf).all() and all((x == 0).all() for x in (out, *grads))


@pytest.mark.usefixtures("implementation")
def test_extreme_scores_stay_finite():
    q, k, v = fp32_heads(5, 7)
    for factor in (1e4, 0.0, 1e-40):
        heads, index = (q * factor, k * factor, v), random_index(5, 7, 4, (1, 1))
        exact = gradients(reference, [x.double() for x in heads], index)
        for a, b in zip(gradients(gathered_attention, heads, index), exact, strict=True):
            assert not a.isnan().any() and (a[b > -torch.inf].isfinite()).all()
            if factor < 1:  # scores of 1e8 in fp32 are known to 10 or so
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("implementation")
def test_two_runs_are_bit_identical_and_a_nan_stays_in_its_sequence():
    heads, index = fp32_heads(13, 5, (3, 1)), random_index(13, 5, 8, (3, 1))
    clean = gradients(gathered_attention, heads, index)
    assert_same_bits(clean, gradients(gathered_attention, heads, index))
    heads[2][1] = torch.nan
    assert_same_bits([x[[0, 2]] for x in clean], [x[[0, 2]] for x in gradients(gathered_attention, heads, index)])


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("dim", [16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("length,places,rows", [(1, 3, (2, 2)), (17, 5, (1, 2)), (100, 4, (1, 1))])
def test_kernels_at_every_head_dim_and_length(length, places, rows, dim, dtype, kernels):
    check(fp32_heads(length, length + 3, rows, dim, dtype), random_index(length, length + 3, places, rows))
