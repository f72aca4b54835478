import hashlib

import pytest
import torch

from megasparse.data.order import permutation
from megasparse.ops.random import (
    KeyTable,
    PairDropout,
    RngContext,
    add_dropout,
    add_dropout_,
    bits_by_head,
    derive,
    dropout,
    normal,
    normal_by_head,
    random_bits,
    relu_dropout,
    rotations,
    subkey,
)
from tests.helpers.cases import together
from tests.helpers.operators import DEVICE


def test_draws_are_the_same_bits_under_every_version_of_torch():
    """Across versions: keys, bits, orders of samples. Within a version only: whatever torch computes, such as normal
    numbers (logarithms and cosines), initial weights (torch.randn), sums and products."""
    bits = random_bits(derive(0, "x"), torch.arange(50), 33)
    digests = [hashlib.sha256(x.tobytes()).hexdigest()[:16] for x in (bits.cpu().numpy(), permutation(1000, 3, 1))]
    assert derive(1, "a", 2) == 13600048505179461908
    assert digests == ["664502d494bdee5a", "214347fe4a1df3d0"]


def test_keys_differ_by_every_part_and_by_type():
    assert len({derive(*parts) for parts in [(0, 1), (1, 0), (0, 1, 2), (0, "1"), ("0", 1), (0, 12), (1, 2)]}) == 7
    assert derive(7, "lsh") == derive(7, "lsh") < 2**64


def test_bits_are_uniform_and_unrelated_over_rows_columns_and_keys():
    rows = torch.arange(2000) * (1 << 32) + torch.arange(2000).flip(0)
    uniform = (random_bits(derive("a"), rows, 128).double() + 2**31) / 2**32
    assert abs(uniform.mean() - 0.5) < 4 * (1 / 12 / uniform.numel()) ** 0.5
    histogram = torch.histc(uniform, 64)
    chi_square = ((histogram - uniform.numel() / 64) ** 2 / (uniform.numel() / 64)).sum()
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5
    other = random_bits(derive("b"), rows, 128).double()
    for a, b in [(uniform[1:], uniform[:-1]), (uniform[:, 1:], uniform[:, :-1]), (uniform, other)]:
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 4 / a.numel() ** 0.5


def test_sample_and_position_are_not_interchangeable():
    bits = random_bits(1, RngContext(0, 0, torch.tensor([0, 1]), True).rows(2, torch.device("cpu")), 8)
    assert not torch.equal(bits[0, 1], bits[1, 0])


def test_dropout_depends_on_sample_and_position_only():
    x = torch.ones(3, 40, 16)
    rows = RngContext(0, 5, torch.tensor([8, 9, 10]), True).rows(40, x.device)
    whole = dropout(x, 0.25, 99, rows)
    torch.testing.assert_close(dropout(x[1:2, 10:], 0.25, 99, rows[1:2, 10:]), whole[1:2, 10:], rtol=0, atol=0)
    assert set(whole.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert not torch.equal(dropout(x, 0.25, 100, rows), whole)
    many = dropout(torch.ones(1, 4000, 64), 0.25, 3, RngContext(0, 0, torch.tensor([0]), True).rows(4000, x.device))
    assert abs((many == 0).double().mean() - 0.25) < 4 * (0.25 * 0.75 / many.numel()) ** 0.5


def test_normal_has_normal_moments():
    x = normal(derive("moments"), torch.arange(1000), 1000).double()
    n = x.numel()
    assert abs(x.mean()) < 4 / n**0.5
    assert abs((x**2).mean() - 1) < 4 * (2 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 4 * (96 / n) ** 0.5


def test_rotations_depend_on_the_global_head_and_the_round():
    everything = rotations(5, range(0, 8), 4, 16, [8, 6], torch.device("cpu"))
    assert everything.shape == (8, 4, 16, 7)
    part = rotations(5, range(3, 5), 2, 16, [8, 6], torch.device("cpu"))
    torch.testing.assert_close(part, everything[3:5, :2], rtol=0, atol=0)


@together("implementation", ["blockwise", "triton"])
def test_keys_in_device_memory_draw_as_numbers_of_the_host(implementation, monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", implementation)
    table, samples = KeyTable(DEVICE), torch.tensor([3, 5], device=DEVICE)
    rows, x = RngContext(1, 4, samples, True).rows(6, DEVICE), torch.ones(2, 6, 10, device=DEVICE)
    key = subkey(RngContext(1, 4, samples, True, table=table).key(2, "x"), "y", 7)
    draws = (
        lambda key: random_bits(key, rows, 33), lambda key: bits_by_head(key, range(1, 3), 2, 5, DEVICE),
        lambda key: normal_by_head(key, range(1, 3), 2, 5, DEVICE), lambda key: dropout(x, 0.25, key, rows),
        lambda key: PairDropout.of(0.25, key, rows, range(2)).queries,
        lambda key: PairDropout.of(0.25, key, rows, range(2)).keys(6),
    )  # fmt: skip
    for step in (4, 5):
        table.fill(step)
        assert all(torch.equal(draw(key), draw(derive(derive(1, step, 2, "x"), "y", 7))) for draw in draws)
    table.complete = True
    with pytest.raises(RuntimeError, match="draws from"):
        random_bits(subkey(key, "z"), rows, 1)


def test_draws_change_with_seed_step_layer_and_purpose():
    samples = torch.arange(1)
    keys = {RngContext(*place, samples, True).key(layer, "x") for place in [(0, 0), (0, 1), (1, 0)] for layer in (0, 1)}
    assert len(keys) == 6
    assert RngContext.evaluation(0, 1).key(0, "x") == RngContext.evaluation(0, 4).key(0, "x")


ROWS = RngContext(3, 5, torch.tensor([7, 2**31 + 5]), True).rows


def both_ways(function, shape, dtype, monkeypatch):
    """Output and gradient of a function of x and its rows, in torch on the CPU and by the kernel."""
    made = []
    for name, device in (("blockwise", torch.device("cpu")), ("triton", DEVICE)):
        monkeypatch.setenv("MEGASPARSE_OPS", name)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        out = function(x, ROWS(shape[1], device))
        out.backward(torch.randn(shape, generator=generator).to(device, out.dtype).mT.contiguous().mT)
        made.append((out.detach().cpu(), x.grad.cpu()))
    return made


@pytest.mark.parametrize(
    "length,width,rate,key,dtype",
    [
        (5, 24, 0.1, 2**63 + 17, torch.float32),
        (3, 1500, 0.5, 5, torch.bfloat16),
        (3, 1500, 0.5, 5, torch.float16),
        (1, 1, 0.99, 2**32 - 1, torch.float32),
    ],
)
def test_kernel_and_torch_dropout_masks_are_bit_identical(length, width, rate, key, dtype, monkeypatch):
    blockwise, kernel = both_ways(lambda x, rows: dropout(x, rate, key, rows), (2, length, width), dtype, monkeypatch)
    for a, b in zip(blockwise, kernel, strict=True):
        assert torch.equal(a == 0, b == 0) and torch.equal(a.signbit(), b.signbit())
        # The interpreter cuts bf16 off where torch and a GPU round.
        assert torch.equal(a, b) or (dtype == torch.bfloat16 and ((a - b).abs() <= 2**-7 * a.abs()).all())
    assert width == 1 or 0 < (kernel[0] == 0).double().mean() < 1


@pytest.mark.parametrize("function", [relu_dropout, lambda *given: dropout(*given, torch.float32)])
def test_dropout_of_relu_and_into_another_dtype_equal_torch(function, monkeypatch):
    """fp16: the interpreter rounds it as torch does."""
    made = both_ways(lambda x, rows: function(x, 0.25, 2**63 + 17, rows), (2, 9, 48), torch.float16, monkeypatch)
    for blockwise, kernel in zip(*made, strict=True):
        assert torch.equal(blockwise, kernel) and blockwise.dtype == kernel.dtype
    assert 0.2 < (made[1][1] == 0).double().mean() < 0.7


def test_an_addition_to_a_stream_equals_torch_and_can_be_undone(monkeypatch):
    made = []
    for name, device in (("blockwise", torch.device("cpu")), ("triton", DEVICE)):
        monkeypatch.setenv("MEGASPARSE_OPS", name)
        generator = torch.Generator().manual_seed(1)
        stream = torch.randn(2, 9, 48, generator=generator).to(device).requires_grad_()
        x = torch.randn(2, 9, 48, generator=generator).to(device, torch.float16).requires_grad_()
        given = (x, 0.25, 99, ROWS(9, device))
        out = add_dropout(stream, *given)
        out.backward(torch.randn(2, 9, 48, generator=generator).to(device))
        with torch.no_grad():
            torch.testing.assert_close(add_dropout(out, *given, -1), stream)
            for place in (stream.detach().clone(), stream.detach().repeat(1, 2, 1)[:, :9]):  # whole, and a tile
                add_dropout_(place, *given)
                assert torch.equal(place, out)
        made.append([y.detach().cpu() for y in (out, stream.grad, x.grad)])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_an_empty_batch_is_dropped_to_an_empty_batch(monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")
    assert dropout(torch.ones(2, 0, 8, device=DEVICE), 0.2, 9, ROWS(0, DEVICE)).shape == (2, 0, 8)


@pytest.mark.parametrize("shape,columns", [((), 3), ((2, 3), 1500), ((0,), 4)])
def test_the_kernels_bits_equal_torch(shape, columns, monkeypatch):
    rows = torch.randint(-(2**63), 2**63 - 1, shape, generator=torch.Generator().manual_seed(2))
    monkeypatch.setenv("MEGASPARSE_OPS", "blockwise")
    expected = random_bits(2**63 + 17, rows, columns)
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")
    assert torch.equal(random_bits(2**63 + 17, rows.to(DEVICE), columns).cpu(), expected)


def test_the_kernels_bits_by_head_equal_torch(monkeypatch):
    found = []
    for name, device in (("blockwise", torch.device("cpu")), ("triton", DEVICE)):
        monkeypatch.setenv("MEGASPARSE_OPS", name)
        found.append(bits_by_head(2**63 + 17, range(3, 5), 4, 192, device).cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize("key", [5, 2**64 - 1])
def test_the_kernels_normal_numbers_equal_torch(key, monkeypatch):
    """To the last bit of fp32 but where float64 logarithms and cosines that differ in theirs round apart."""
    heads, count, columns = range(3, 7), 3, 1100
    rows = torch.tensor([[head * 65536 + number for number in range(count)] for head in heads])
    monkeypatch.setenv("MEGASPARSE_OPS", "blockwise")
    expected = normal(key, rows, columns)
    assert torch.equal(normal_by_head(key, heads, count, columns, torch.device("cpu")), expected)
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")
    found = normal_by_head(key, heads, count, columns, DEVICE).cpu()
    torch.testing.assert_close(found, expected, rtol=2**-23, atol=0)
    assert (found == expected).double().mean() > 0.999
