"""An operator that exists only in this file, in the three forms that CONTRIBUTING.md describes."""

import pytest
import torch
import triton
import triton.language as tl

from megasparse.ops.kernels import launch, recorded
from megasparse.ops.operator import VARIABLE, Function, Operator
from tests.helpers.kernels import DEVICE

BLOCK = 16
calls = []


def reference(x):
    calls.append("reference")
    return (x.double() * x.double()).to(x.dtype)


def blocks(x):
    calls.append("blockwise")
    return torch.cat([part.square() for part in x.split(BLOCK)])


def kernels(x):
    calls.append("triton")
    return Square.apply(x)


@triton.jit
def scaled(x, factor, scale, y, count, BLOCK: tl.constexpr):
    """Compute y = scale·x·factor."""
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + slots, slots < count, 0.0) * tl.load(factor + slots, slots < count, 0.0)
    tl.store(y + slots, scale * value, slots < count)


class Square(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        launch(scaled, (-(-len(x) // BLOCK),), x, x, 1.0, y, len(x), BLOCK=BLOCK, num_warps=1)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        launch(scaled, (-(-len(x) // BLOCK),), x, gradient.contiguous(), 2.0, out, len(x), BLOCK=BLOCK, num_warps=1)
        return out


square = Operator(blocks, reference=reference, kernels=f"{__name__}:kernels", largest_width=None)


@pytest.mark.parametrize("forced", ["reference", "blockwise", "triton"])
def test_three_forms_of_one_operator_agree(forced, monkeypatch):
    monkeypatch.setenv(VARIABLE, forced)
    x = torch.linspace(-3, 3, 37, device=DEVICE, requires_grad=True)  # an odd length: the last block is not full
    calls.clear()
    y = square(x)
    assert calls == [forced]
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, x.detach() ** 2)
    torch.testing.assert_close(gradient, 2 * x.detach())
    with recorded() as started:
        square(x).sum().backward()
    assert len(started) == (2 if forced == "triton" else 0)
