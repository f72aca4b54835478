"""An operator that exists only in this file, in the three forms that CONTRIBUTING.md describes."""

import pytest
import torch
import triton
import triton.language as tl

from megasparse.ops.kernels import launch, recorded
from megasparse.ops.operator import VARIABLE, Function, Operator
from tests.helpers.kernels import DEVICE

BLOCK = 16


def reference(x):
    """y = x²."""
    return (x.double() * x.double()).to(x.dtype)


def blockwise(x):
    return torch.cat([part.square() for part in x.split(BLOCK)])


@triton.jit
def square(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < count, 0.0)
    tl.store(y + at, value * value, at < count)


@triton.jit
def square_gradient(x, gradient, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < count, 0.0) * tl.load(gradient + at, at < count, 0.0)
    tl.store(out + at, 2.0 * value, at < count)


class Square(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        launch(square, (-(-len(x) // BLOCK),), x, y, len(x), BLOCK=BLOCK, num_warps=1)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        launch(square_gradient, (-(-len(x) // BLOCK),), x, gradient.contiguous(), out, len(x), BLOCK=BLOCK, num_warps=1)
        return out


def by_kernels(x):
    """Compute the square by kernels."""
    return Square.apply(x)


operator = Operator(blockwise, kernels=f"{__name__}:by_kernels", reference=reference)


@pytest.mark.parametrize("forced", ["reference", "blockwise", "triton"])
def test_an_operator_runs_what_is_forced_without_autocast_on_cast_arguments(forced, monkeypatch):
    calls = []

    def record(name):
        def run(x, y, *, dropout=None):
            calls.append((name, torch.is_autocast_enabled(DEVICE.type), torch.is_grad_enabled(), y.dtype, dropout))
            return x

        return run

    monkeypatch.setenv(VARIABLE, forced)
    monkeypatch.setitem(globals(), "recorded_kernel", record("triton"))
    settings = {"kernels": f"{__name__}:recorded_kernel", "reference": record("reference"), "cast": 1}
    x, y = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE, dtype=torch.bfloat16)
    for differentiable in (True, False):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            Operator(record("blockwise"), **settings, differentiable=differentiable)(x, y, dropout=None)
    assert calls == [(forced, False, grad, torch.float32, None) for grad in (True, False)]


@pytest.mark.parametrize("forced", ["reference", "blockwise", "triton"])
def test_three_forms_of_one_operator_agree(forced, monkeypatch):
    monkeypatch.setenv(VARIABLE, forced)
    x = torch.linspace(-3, 3, 37, device=DEVICE, requires_grad=True)  # an odd length: the last block is not full
    y = operator(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, x.detach() ** 2)
    torch.testing.assert_close(gradient, 2 * x.detach())
    with recorded() as started:
        operator(x).sum().backward()
    assert len(started) == (2 if forced == "triton" else 0)
