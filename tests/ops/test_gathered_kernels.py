import pytest
import torch

from megasparse.ops.gathered_attention import gathered_attention, operator
from megasparse.ops.gathered_attention import gpu as kernels
from megasparse.ops.gathered_attention.reference import gathered_attention as defined
from tests.helpers.kernels import DEVICE

NAMES = ["out", "z", "dq", "dk", "dv"]
BARS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 3e-2), torch.float16: (1e-2, 3e-2)}


def random_heads(queries, keys, dim=16, rows=(2, 2), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*rows, n, dim, generator=generator).to(DEVICE, dtype) for n in (queries, keys, keys)]


def random_index(queries, keys, places, rows=(2, 2), seed=1):
    """Some places empty, some rows empty, some keys named twice, the first key by about a third."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, keys, (*rows, queries, places), generator=generator)
    index = index.masked_fill(torch.rand(index.shape, generator=generator) < 0.3, 0)
    return index.masked_fill(torch.rand(*rows, queries, 1, generator=generator) < 0.2, -1).to(DEVICE)


def gradients(attention, heads, index, scale=0.3):
    q, k, v = (x.clone().requires_grad_() for x in heads)
    out, z = attention(q, k, v, index, scale=scale)
    generator = torch.Generator().manual_seed(2)
    out_grad, z_grad = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, z))
    loss = (out * out_grad.to(out)).sum() + (z.masked_fill(z == -torch.inf, 0.0) * z_grad.to(z)).sum()
    return out.detach(), z.detach(), *torch.autograd.grad(loss, [q, k, v])


def assert_equal_to_the_definition(heads, index):
    ours = gradients(kernels.gathered_attention, heads, index)
    exact = gradients(defined, [x.double() for x in heads], index)
    assert ours[0].dtype == ours[2].dtype == heads[0].dtype and ours[1].dtype == torch.float32
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        seen = b > -torch.inf
        assert torch.equal(a == -torch.inf, ~seen), name
        a, b = a[seen].double(), b[seen]
        bar = BARS[heads[0].dtype][name[0] == "d"]
        assert (a - b).norm() <= bar * b.norm() + 1e-6 * b.numel() ** 0.5, (name, (a - b).norm() / b.norm())


@pytest.mark.parametrize(
    "queries,keys,places,rows",
    [(1, 1, 1, (2, 2)), (1, 9, 12, (1, 2)), (11, 11, 4, (2, 2)), (9, 6, 9, (2, 1)), (5, 20, 30, (1, 1))],
)
def test_N5_forward_and_gradients_are_those_of_the_definition(queries, keys, places, rows):
    index = random_index(queries, keys, places, rows)
    assert_equal_to_the_definition(random_heads(queries, keys), index.to(torch.int32))


@pytest.mark.parametrize("dtype", BARS, ids=str)
def test_every_dtype_and_a_head_dim_between_powers_of_two(dtype):
    assert_equal_to_the_definition(random_heads(9, 13, 40, (1, 2), dtype), random_index(9, 13, 5, (1, 2)))


def test_keys_that_all_choose_and_keys_that_none_does():
    """The first has more tiles of entries than one step of `join_tiles` takes, the next ones end or begin in a tile."""
    index = torch.zeros(1, 1, 24, 30, dtype=torch.int64, device=DEVICE)
    index[:, :, 12:] = torch.arange(30, device=DEVICE) // 5
    index[:, :, 20:, 3:] = -1
    assert_equal_to_the_definition(random_heads(24, 12, rows=(1, 1)), index)


def test_nothing_to_see():
    index = torch.full((1, 1, 6, 3), -1, device=DEVICE)
    heads = random_heads(6, 4, rows=(1, 1))
    out, z, *grads = gradients(kernels.gathered_attention, heads, index)
    assert (z == -torch.inf).all() and all((x == 0).all() for x in (out, *grads))


def test_finite_in_hard_cases():
    q, k, v = random_heads(5, 7, rows=(1, 1))
    index = random_index(5, 7, 4, (1, 1))
    for name, heads in {
        "large": (q * 1e4, k * 1e4, v),
        "zero": (q * 0, k * 0, v),
        "denormal": (q * 1e-40, k * 1e-40, v),
    }.items():
        exact = gradients(defined, [x.double() for x in heads], index)
        for a, b in zip(gradients(kernels.gathered_attention, heads, index), exact, strict=True):
            assert not a.isnan().any() and (a[b > -torch.inf].isfinite()).all(), name
            if name != "large":  # scores of 1e8 in fp32 are known to 10 or so
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_views_and_broadcast_gradients_are_read_right():
    heads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in random_heads(5, 7, rows=(1, 2))]
    assert not heads[0].is_contiguous()
    index = random_index(5, 7, 4, (1, 2))
    assert_equal_to_the_definition(heads, index)
    assert_equal_to_the_definition([x.mT.contiguous().mT for x in heads], index)
    assert_equal_to_the_definition(heads, index.mT.contiguous().mT)
    for of in (0, 1):  # the other one gets no gradient at all, and this one an expanded one
        found = []
        for attention, dtype in ((kernels.gathered_attention, torch.float32), (defined, torch.float64)):
            inputs = [x.to(dtype).detach().requires_grad_() for x in heads]
            result = attention(*inputs, index, scale=0.3)[of]
            result.masked_fill(result == -torch.inf, 0.0).sum().backward()
            found.append([torch.zeros_like(x) if x.grad is None else x.grad for x in inputs])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_two_runs_are_the_same_to_the_last_bit():
    heads, index = random_heads(13, 5, rows=(1, 1)), random_index(13, 5, 8, (1, 1))
    first, second = (gradients(kernels.gathered_attention, heads, index) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["reference", "blockwise", "triton"])
def test_the_operator_runs_what_it_is_told_to(name, monkeypatch):
    def chosen(*arguments, **settings):
        raise RuntimeError(f"{name} it is")

    monkeypatch.setattr(kernels if name == "triton" else getattr(operator, name), "gathered_attention", chosen)
    monkeypatch.setenv("MEGASPARSE_OPS", name)
    with pytest.raises(RuntimeError, match=f"{name} it is"):
        gathered_attention(*random_heads(1, 1), random_index(1, 1, 1), scale=1.0)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("dim", [16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("length,places,rows", [(1, 3, (2, 2)), (17, 5, (1, 2)), (100, 4, (1, 1))])
def test_N5_kernels_at_every_head_dim_and_length(length, places, rows, dim, dtype):
    heads = random_heads(length, length + 3, dim, rows, dtype)
    assert_equal_to_the_definition(heads, random_index(length, length + 3, places, rows))
