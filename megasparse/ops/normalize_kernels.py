"""Layer norm, RMS norm and unit vectors as Triton kernels: one launch forward; one backward, and a sum over partial
gradients of a norm's weights. A program of a norm processes whole rows of E = `width` numbers in fp32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megasparse.ops.kernels import block, empty_alike, launch, load_rows, store_rows, strides, whole_vectors
from megasparse.ops.normalize import SHORTEST
from megasparse.ops.operator import Function


@triton.jit
def _normalised(x, inside, width, eps, CENTRED: tl.constexpr):
    """Return (x − mean)/√(variance + eps) of a row, 0 outside, and 1/√(variance + eps)."""
    centred = tl.where(inside, x - tl.sum(x, 0) / width, 0.0) if CENTRED else x
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    return centred * scale, scale


@triton.jit(do_not_specialize=["eps"])
def norm(x, weight, bias, out, width, eps, CENTRED: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    offsets = tl.program_id(0).to(tl.int64) * width + columns
    row, _ = _normalised(tl.load(x + offsets, mask=inside, other=0).to(tl.float32), inside, width, eps, CENTRED)
    gain = tl.load(weight + columns, mask=inside, other=0).to(tl.float32)
    result = row * gain
    if CENTRED:
        result += tl.load(bias + columns, mask=inside, other=0).to(tl.float32)
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps", "programs", "rows"])
def norm_gradient(x, weight, grad, dx, sums, rows, width, programs, eps, CENTRED: tl.constexpr, WIDTH: tl.constexpr):
    """Compute dx (rows, E), and each program's partial gradients of the weights, (programs, 1 or 2, E)."""
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    gain = tl.load(weight + columns, mask=inside, other=0).to(tl.float32)
    to_weight = tl.zeros([WIDTH], tl.float32)
    to_bias = tl.zeros([WIDTH], tl.float32)
    row = tl.program_id(0)
    while row < rows:
        offsets = row.to(tl.int64) * width + columns
        unit, scale = _normalised(
            tl.load(x + offsets, mask=inside, other=0).to(tl.float32), inside, width, eps, CENTRED
        )
        slope = tl.load(grad + offsets, mask=inside, other=0).to(tl.float32)
        to_weight += slope * unit
        to_bias += slope
        slope *= gain
        along = tl.sum(slope * unit, 0) / width
        mean = tl.sum(slope, 0) / width if CENTRED else 0.0
        change = scale * (slope - mean - unit * along)
        tl.store(dx + offsets, change.to(dx.dtype.element_ty), mask=inside)
        row += programs
    address = sums + tl.program_id(0).to(tl.int64) * (1 + CENTRED) * width + columns
    tl.store(address, to_weight, mask=inside)
    if CENTRED:
        tl.store(address + width, to_bias, mask=inside)


_PROGRAMS = 512  # programs of the weight gradient, fixed so that sums do not depend on the GPU


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute `normalize.layer_norm`. Means and variances are recomputed in the backward, without extra reads."""
    return _LayerNorm.apply(x, weight, bias, eps, dtype)


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x, dtype=dtype)
        width = x.shape[-1]
        wide = triton.next_power_of_2(width)
        ctx.shared = {"width": width, "eps": eps, "CENTRED": bias is not None}
        ctx.shared |= {"WIDTH": wide, "num_warps": min(16, max(1, wide // 256))}
        launch(norm, (x.numel() // width,), x=x, weight=weight, bias=bias, out=out, **ctx.shared)
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        width = x.shape[-1]
        rows = x.numel() // width
        programs = min(_PROGRAMS, rows)
        dx = torch.empty_like(x)
        sums = x.new_empty(programs, 1 + ctx.shared["CENTRED"], width, dtype=torch.float32)
        launch(
            norm_gradient, (programs,), x=x, weight=weight, grad=grads[0].contiguous(), dx=dx, sums=sums, rows=rows,
            programs=programs, **ctx.shared,
        )  # fmt: skip
        d_weight, *d_bias = sums.sum(0).to(weight.dtype)
        return dx, d_weight, d_bias[0] if d_bias else None, None, None


@triton.jit
def _tokens(heads, length, blocks, TOKENS: tl.constexpr):
    """Return a program's batch element, head and tokens, and a mask of those that exist."""
    row = tl.program_id(0) // blocks
    token = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    return (row // heads).to(tl.int64), (row % heads).to(tl.int64), token, token < length


@triton.jit
def _over(x, divisor):
    """Return x / divisor, 0 if the divisor is 0."""
    return tl.where(divisor > 0, x / tl.where(divisor > 0, divisor, 1.0), 0.0)


@triton.jit(do_not_specialize=["heads", "length", "blocks"])
def unit(
    q, k, q_batch, q_head, q_stride, k_batch, k_head, k_stride, heads, length, blocks, shortest, D: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute k = q / max(|q|, shortest), 0 for a zero vector."""
    batch, head, token, inside = _tokens(heads, length, blocks, TOKENS)
    x = load_rows(q + batch * q_batch + head * q_head, token, inside, q_stride, D, WIDTH).to(tl.float32)
    divisor = tl.maximum(tl.sqrt(tl.sum(x * x, 1))[:, None], shortest)
    store_rows(k + batch * k_batch + head * k_head, token, _over(x, divisor), inside, k_stride, D, WIDTH)


@triton.jit(do_not_specialize=["heads", "length", "blocks"])
def unit_gradient(
    q, grad_q, grad_k, dq, q_batch, q_head, q_stride, grad_q_batch, grad_q_head, grad_q_stride, grad_k_batch,
    grad_k_head, grad_k_stride, dq_batch, dq_head, dq_stride, heads, length, blocks, shortest, D: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute dq = grad_q + (grad_k − u·(u·grad_k)) / |q| with u = q/|q|; grad_k/shortest for shorter queries, and 0
    for a zero vector if shortest is 0. grad_q: None means 0.
    """
    batch, head, token, inside = _tokens(heads, length, blocks, TOKENS)
    x = load_rows(q + batch * q_batch + head * q_head, token, inside, q_stride, D, WIDTH).to(tl.float32)
    grad = load_rows(grad_k + batch * grad_k_batch + head * grad_k_head, token, inside, grad_k_stride, D, WIDTH).to(
        tl.float32
    )
    norm_x = tl.sqrt(tl.sum(x * x, 1))[:, None]
    divisor = tl.maximum(norm_x, shortest)
    u = _over(x, divisor)
    along = tl.where(norm_x >= shortest, tl.sum(u * grad, 1)[:, None], 0.0)
    total = _over(grad - u * along, divisor)
    if grad_q is not None:
        total += load_rows(
            grad_q + batch * grad_q_batch + head * grad_q_head, token, inside, grad_q_stride, D, WIDTH
        ).to(tl.float32)
    store_rows(dq + batch * dq_batch + head * dq_head, token, total, inside, dq_stride, D, WIDTH)


_NUMBERS = 4096  # per program


def unit_keys(q: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `normalize.unit_keys`."""
    q, k = _Unit.apply(q, SHORTEST, q.dtype)
    return q, k


def unit_vectors(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Compute `normalize.unit_vectors`."""
    _, out = _Unit.apply(x, 0.0, dtype or torch.float32)
    return out


class _Unit(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, shortest: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows = whole_vectors(q)
        k = empty_alike(rows, dtype)
        _launch_unit(unit, shortest, q=rows, k=k)
        ctx.shortest = shortest
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows)
        return q, k

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (q,) = ctx.saved_tensors
        grad_q, grad_k = (None if grad is None else whole_vectors(grad) for grad in grads)
        if grad_k is None:
            return grad_q, None, None
        dq = empty_alike(q)
        _launch_unit(unit_gradient, ctx.shortest, q=q, grad_q=grad_q, grad_k=grad_k, dq=dq)
        return dq, None, None


def _launch_unit(kernel: Any, shortest: float, q: Tensor, **others: Tensor | None) -> None:
    batch, heads, length, width = q.shape
    wide = block(width)
    tokens = max(1, _NUMBERS // wide)
    blocks = -(-length // tokens)
    tensors = {"q": q, **others}
    steps = strides(**{name: q if x is None else x for name, x in tensors.items()})
    launch(
        kernel, (blocks * batch * heads,), **tensors, **steps, heads=heads, length=length, blocks=blocks,
        shortest=shortest, D=width, WIDTH=wide, TOKENS=tokens,
    )  # fmt: skip
