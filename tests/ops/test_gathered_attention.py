import pytest
import torch
import torch.nn.functional as F

import megasparse.ops.gathered_attention.blockwise as blockwise
from megasparse.ops.gathered_attention import gathered_attention
from megasparse.ops.gathered_attention.reference import gathered_attention as defined
from tests.helpers.peak_memory import PeakMemory

NAMES = ["out", "z", "dq", "dk", "dv"]


def random_heads(queries, keys=None, batch=2, heads=3, dim=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = [queries, *[keys or queries] * 2]
    return [torch.randn(batch, heads, n, dim, generator=generator, dtype=dtype) for n in lengths]


def random_index(queries, keys, places, batch=2, heads=3, seed=1):
    """Some places empty, some rows empty, some keys named twice."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, keys, (batch, heads, queries, places), generator=generator)
    return index.masked_fill(torch.rand(batch, heads, queries, 1, generator=generator) < 0.2, -1)


def gradients(attention, heads, index, scale=0.7):
    q, k, v = (x.clone().requires_grad_() for x in heads)
    out, z = attention(q, k, v, index, scale=scale)
    generator = torch.Generator().manual_seed(2)
    out_grad, z_grad = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, z))
    loss = (out * out_grad.to(out.dtype)).sum() + (z.masked_fill(z == -torch.inf, 0.0) * z_grad.to(z.dtype)).sum()
    return out.detach(), z.detach(), *torch.autograd.grad(loss, [q, k, v])


@pytest.mark.parametrize("queries,keys", [(1, 1), (1, 9), (17, 17), (13, 6), (5, 20)])
@pytest.mark.parametrize("places", [1, 4, 30])
def test_N5_forward_and_gradients_are_those_of_the_definition(queries, keys, places, monkeypatch):
    monkeypatch.setattr(blockwise, "_GATHERED_ELEMENTS", 7 * 5 * places)  # several blocks, some across heads
    heads = random_heads(queries, keys)
    for batch, count in ((2, 3), (1, 3), (2, 1), (1, 1)):
        index = random_index(queries, keys, places, batch, count)
        for dtype in (torch.int32, torch.int64):
            ours, exact = gradients(gathered_attention, heads, index.to(dtype)), gradients(defined, heads, index)
            for name, a, b in zip(NAMES, ours, exact, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_naming_every_key_is_full_attention():
    q, k, v = random_heads(12, 20)
    index = torch.arange(20).expand(1, 1, 12, 20)
    torch.testing.assert_close(
        gathered_attention(q, k, v, index, scale=5**-0.5)[0], F.scaled_dot_product_attention(q, k, v)
    )


def test_a_query_with_no_key_gets_zero_and_gives_no_gradient():
    heads = random_heads(6, dtype=torch.float32)
    index = random_index(6, 6, 3)
    index[:, :, 2] = -1
    out, z, dq, *_ = gradients(gathered_attention, heads, index)
    assert (out[:, :, 2] == 0).all() and (z[:, :, 2] == -torch.inf).all() and (dq[:, :, 2] == 0).all()
    results = gradients(gathered_attention, heads, torch.full_like(index, -1))
    assert all((x == 0).all() for i, x in enumerate(results) if i != 1)


def test_N5_fp32_and_bf16_are_within_their_bars_of_the_definition_at_length():
    index = random_index(300, 300, 20)
    for dtype, forward, backward in ((torch.float32, 1e-5, 1e-4), (torch.bfloat16, 1e-2, 3e-2)):
        heads = [x.to(dtype) for x in random_heads(300, dim=32)]
        exact = gradients(defined, [x.double() for x in heads], index, 32**-0.5)
        ours = gradients(gathered_attention, heads, index, 32**-0.5)
        assert ours[0].dtype == ours[2].dtype == dtype and ours[1].dtype == torch.float32
        for name, a, b in zip(NAMES, ours, exact, strict=True):
            seen = b > -torch.inf
            a, b = a.double().masked_fill(~seen, 0.0), b.masked_fill(~seen, 0.0)
            assert (a - b).norm() / b.norm() < (forward if name in ("out", "z") else backward), (dtype, name)


def test_finite_in_hard_cases():
    q, k, v = random_heads(15, dtype=torch.float32)
    cases = {"large": (q * 1e4, k * 1e4, v), "zero": (q * 0, k * 0, v), "denormal": (q * 1e-40, k * 1e-40, v)}
    index = random_index(15, 15, 4)
    for name, heads in cases.items():
        exact = gradients(defined, [x.double() for x in heads], index)
        for a, b in zip(gradients(gathered_attention, heads, index), exact, strict=True):
            assert not a.isnan().any() and (a[b > -torch.inf].isfinite()).all(), name
            # Scores of 1e8 in fp32 are known to 10 or so: only their order is.
            if name != "large":
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_N5_gradcheck():
    q, k, v = (x.requires_grad_() for x in random_heads(5, 4, batch=1, heads=2, dim=3))
    index = torch.randint(0, 4, (1, 2, 5, 3), generator=torch.Generator().manual_seed(0))
    index[..., 2] = -1
    assert torch.autograd.gradcheck(lambda q, k, v: gathered_attention(q, k, v, index, scale=0.5), (q, k, v))


def test_the_same_bits_twice_and_a_nan_stays_in_its_own_sequence():
    heads = random_heads(40, batch=3, dtype=torch.float32)
    index = random_index(40, 40, 8, batch=3)
    clean = gradients(gathered_attention, heads, index)
    for a, b in zip(clean, gradients(gathered_attention, heads, index), strict=True):
        assert torch.equal(a, b)
    heads[2][1] = torch.nan
    for a, b in zip(clean, gradients(gathered_attention, heads, index), strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


def test_memory_is_linear_in_the_length():
    def peak(length):
        heads = [x.requires_grad_() for x in random_heads(length, batch=1, heads=2, dim=16, dtype=torch.float32)]
        index = random_index(length, length, 8, batch=1, heads=1)
        with PeakMemory() as memory:
            gathered_attention(*heads, index, scale=0.25)[0].sum().backward()
        assert memory.largest < length * length * 4 / 8
        return memory.peak

    assert peak(8192) < 2.2 * peak(4096)
