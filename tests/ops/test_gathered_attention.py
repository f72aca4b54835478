import pytest
import torch
import torch.nn.functional as F

import megasparse.ops.gathered_attention as module
from megasparse.ops.gathered_attention import gathered_attention
from megasparse.ops.gathered_attention import reference as defined
from tests.helpers import operators
from tests.helpers.kernels import DEVICE
from tests.helpers.operators import assert_equal, assert_same_bits, assert_within_bars, random_heads


def random_index(queries, keys, places, rows=(2, 3), seed=1, device="cpu"):
    """Some places empty, some rows empty, some keys named twice, the first key by about a third."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, keys, (*rows, queries, places), generator=generator)
    index = index.masked_fill(torch.rand(index.shape, generator=generator) < 0.3, 0)
    return index.masked_fill(torch.rand(*rows, queries, 1, generator=generator) < 0.2, -1).to(device)


def gradients(attention, heads, index, scale=0.7):
    return operators.gradients(lambda *heads: attention(*heads, index, scale=scale), heads)


@pytest.mark.parametrize("queries,keys", [(1, 1), (1, 9), (17, 17), (13, 6), (5, 20)])
@pytest.mark.parametrize("places", [1, 4, 30])
def test_forward_and_gradients_are_those_of_the_definition(queries, keys, places, monkeypatch):
    monkeypatch.setattr(module, "_GATHERED_ELEMENTS", 7 * 5 * places)  # several blocks, some across heads
    heads = random_heads(queries, keys, (2, 3), 5)
    for rows in ((2, 3), (1, 3), (2, 1), (1, 1)):
        index = random_index(queries, keys, places, rows)
        for dtype in (torch.int32, torch.int64):
            assert_equal(gradients(gathered_attention, heads, index.to(dtype)), gradients(defined, heads, index))


def test_naming_every_key_is_full_attention():
    q, k, v = random_heads(12, 20)
    index = torch.arange(20).expand(1, 1, 12, 20)
    torch.testing.assert_close(
        gathered_attention(q, k, v, index, scale=0.25)[0], F.scaled_dot_product_attention(q, k, v)
    )


@pytest.mark.usefixtures("implementation")
def test_a_query_with_no_key_gets_zero_and_gives_no_gradient():
    heads = random_heads(6, rows=(1, 1), dtype=torch.float32, device=DEVICE)
    index = random_index(6, 6, 3, (1, 1), device=DEVICE)
    index[:, :, 2] = -1
    out, lse, dq, *_ = gradients(gathered_attention, heads, index)
    assert (out[:, :, 2] == 0).all() and (lse[:, :, 2] == -torch.inf).all() and (dq[:, :, 2] == 0).all()
    out, lse, *grads = gradients(gathered_attention, heads, torch.full_like(index, -1))
    assert (lse == -torch.inf).all() and all((x == 0).all() for x in (out, *grads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp32_and_bf16_are_within_their_bars_of_the_definition_at_length(dtype):
    index, heads = random_index(300, 300, 20), random_heads(300, rows=(2, 3), dim=32, dtype=dtype)
    exact = gradients(defined, [x.double() for x in heads], index, 32**-0.5)
    assert_within_bars(gradients(gathered_attention, heads, index, 32**-0.5), exact, dtype)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("factor", [1e4, 0.0, 1e-40])
def test_finite_in_hard_cases(factor):
    q, k, v = random_heads(5, 7, (1, 1), dtype=torch.float32, device=DEVICE)
    heads, index = (q * factor, k * factor, v), random_index(5, 7, 4, (1, 1), device=DEVICE)
    exact = gradients(defined, [x.double() for x in heads], index)
    for a, b in zip(gradients(gathered_attention, heads, index), exact, strict=True):
        assert not a.isnan().any() and (a[b > -torch.inf].isfinite()).all()
        if factor < 1:  # scores of 1e8 in fp32 are known to 10 or so
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("implementation")
def test_the_same_bits_twice_and_a_nan_stays_in_its_own_sequence():
    heads = random_heads(13, 5, (3, 1), dtype=torch.float32, device=DEVICE)
    index = random_index(13, 5, 8, (3, 1), device=DEVICE)
    clean = gradients(gathered_attention, heads, index)
    assert_same_bits(clean, gradients(gathered_attention, heads, index))
    heads[2][1] = torch.nan
    dirty = gradients(gathered_attention, heads, index)
    assert_same_bits([x[[0, 2]] for x in clean], [x[[0, 2]] for x in dirty])
