"""The choice of an implementation, and an operator in both forms that exists only in this file (CONTRIBUTING.md)."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from megasparse.errors import ConfigError
from megasparse.ops import operator
from megasparse.ops.kernels import launch, recorded
from megasparse.ops.operator import VARIABLE, Function, Operator, implementation
from megasparse.ops.random import dropout
from tests.helpers.operators import DEVICE
from tests.ops.test_autocast import HEADS, made

BLOCK = 16
calls = []


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
        grid = (-(-len(x) // BLOCK),)
        launch(scaled, grid, x=x, factor=x, scale=1.0, y=y, count=len(x), BLOCK=BLOCK, num_warps=1)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        values = {"x": x, "factor": gradient.contiguous(), "scale": 2.0, "y": out, "count": len(x)}
        launch(scaled, (-(-len(x) // BLOCK),), **values, BLOCK=BLOCK, num_warps=1)
        return out


square = Operator(blocks, kernels=f"{__name__}:kernels", largest_width=None)


@pytest.mark.parametrize("forced", ["blockwise", "triton"])
def test_both_forms_of_one_operator_agree(forced, monkeypatch):
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


@pytest.mark.parametrize("forced", ["blockwise", "triton"])
def test_an_operator_runs_without_autocast_on_cast_arguments(forced, monkeypatch):
    runs = []

    def record(x, y, *, dropout=None):
        runs.append((torch.is_autocast_enabled(DEVICE.type), torch.is_grad_enabled(), y.dtype, dropout))
        return x

    monkeypatch.setenv(VARIABLE, forced)
    monkeypatch.setitem(globals(), "kernels", record)
    x, y = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE, dtype=torch.bfloat16)
    for differentiable in (True, False):
        run = Operator(record, kernels=f"{__name__}:kernels", cast=1, differentiable=differentiable)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            run(x, y, dropout=None)
    assert runs == [(False, grad, torch.float32, None) for grad in (True, False)]


def test_a_cpu_runs_blockwise_torch_unless_another_is_forced(monkeypatch):
    monkeypatch.delenv("MEGASPARSE_OPS", raising=False)
    x = torch.zeros(1, 1, 4, 64)
    assert implementation(x) == "blockwise"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in ("blockwise", "triton"):
        monkeypatch.setenv("MEGASPARSE_OPS", name)
        assert implementation(x) == name


@pytest.mark.parametrize(
    ("value", "x", "said"),
    [
        ("cuda", torch.zeros(4, 64), "'cuda' is not an implementation. Set blockwise or triton"),
        ("triton", torch.zeros(4, 64, dtype=torch.float64), "not float64 of 64"),
        ("triton", torch.zeros(4, 257), "not float32 of 257"),
    ],
)
def test_an_unavailable_implementation_cannot_be_forced(value, x, said, monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", value)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match=said):
        implementation(x)


def test_kernels_on_a_cpu_need_the_interpreter(monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        implementation(torch.zeros(4, 64))


CARDS = {  # capability, bytes of shared memory
    "T4": (7, 64 << 10),
    "RTX 4090": (8, 99 << 10),
    "A100": (8, 163 << 10),
}


@pytest.mark.parametrize(
    ("card", "width", "hip", "said"),
    [
        ("T4", 64, None, "compute capability 8.0, but T4 has 7.5"),
        ("RTX 4090", 256, None, "a head dim of 256 needs more shared memory than the 99 KB"),
        ("A100", 64, "7.0", "not for ROCm"),
        ("RTX 4090", 128, None, ""),
        ("A100", 256, None, ""),
    ],
)
def test_an_unsupported_gpu_runs_blockwise_torch_with_one_warning(card, width, hip, said, monkeypatch):
    major, shared = CARDS[card]
    found = SimpleNamespace(name=card, major=major, minor=5, shared_memory_per_block_optin=shared)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.version, "hip", hip)
    lines = []
    monkeypatch.setattr(operator, "_facts", operator._facts.__wrapped__)
    monkeypatch.setattr(operator, "_say", cache(lines.append))
    x = SimpleNamespace(
        dtype=torch.bfloat16, shape=torch.Size([1, 2, 8, width]), is_cuda=True, is_meta=False, device="cuda"
    )
    assert [implementation(x) for _ in range(2)] == ["blockwise" if said else "triton"] * 2
    assert len(lines) == bool(said) and said in "".join(lines)


def test_more_rows_than_a_grid_has_run_blockwise_torch(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    x = torch.empty(1 << 10, 65, 8, 16, device="meta")
    assert implementation(x) == "triton" and implementation(x, most_rows=operator.MOST_PAIRS) == "blockwise"
    assert implementation(x[:, 1:], most_rows=1 << 16) == "triton"


@pytest.mark.parametrize(
    "case,forced",
    [("bucketed", "blockwise"), ("gathered", "blockwise"), ("gathered", "triton"), ("dropout", "blockwise")],
)
def test_a_second_derivative_is_an_error(case, forced, monkeypatch):
    monkeypatch.setenv(VARIABLE, forced)
    heads = [made(1, 2, 24, 16).requires_grad_() for _ in range(3)]
    rows = torch.arange(24, device=DEVICE)[None]
    out = dropout(heads[0][0], 0.5, 1, rows.expand(2, -1)) if case == "dropout" else HEADS[case](*heads)[0]
    gradient = torch.autograd.grad(out.square().sum(), heads[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
