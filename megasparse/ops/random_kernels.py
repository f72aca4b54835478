"""Dropout, random bits and normal numbers as single kernel launches, with host code. E width of a row."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor, empty_like

from megasparse.ops.kernels import launch, mix
from megasparse.ops.random import Key, halves, least_kept, subkey

_NUMBERS = 4096  # per program
_LARGEST_COLUMNS = 1024
_SCALE = tl.constexpr(2.0**-32)
_TURN = tl.constexpr(2 * math.pi / 2**32)


@triton.jit
def key_halves(low, high):
    """Return the two halves of the key as uint32. low, high: numbers, or the addresses of a `DeviceKey`."""
    if low.dtype.is_ptr():
        low = tl.load(low)
        high = tl.load(high)
    return low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)


@triton.jit
def row_seed(number, low, high):
    """Return the mixed numbers of rows `number`, int64; low, high: the key's halves, uint32."""
    return mix(mix(number.to(tl.uint32) + low) ^ mix((number >> 32).to(tl.uint32) + high))


@triton.jit
def _bits_of(row_seed, column, high):
    """Return the bits of `ops.random.random_bits`, by mixing the sum of row seed and column seed."""
    return mix(row_seed + mix(column.to(tl.uint32) + high)).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["low", "high", "threshold", "scale", "count"])
def _dropout(
    x, rows, stream, out, count, width, low, high, threshold, scale, SIGN: tl.constexpr, RELU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Dropout with the draws of `ops.random.random_bits`, kept from `threshold` on. RELU: apply to relu(x). stream:
    tensor to which SIGN times the result is added, or None.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] & (column < width)[None, :]
    low, high = key_halves(low, high)
    number = tl.load(rows + row, mask=row < count, other=0)
    bits = _bits_of(row_seed(number, low, high)[:, None], column[None, :], high)
    offset = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(x + offset, mask=inside, other=0)
    dropped = value.to(tl.float32) * tl.where(bits >= threshold, scale, 0.0)
    if RELU:
        dropped = tl.where(dropped < 0, 0.0, dropped)  # NaN stays
    if stream is not None:
        dropped = tl.load(stream + offset, mask=inside, other=0).to(tl.float32) + SIGN * dropped
    tl.store(out + offset, dropped.to(out.dtype.element_ty), mask=inside)


def drop(
    x: Tensor,
    dtype: torch.dtype,
    rate: float,
    key: Key,
    rows: Tensor,
    relu: bool = False,
    stream: Tensor | None = None,
    sign: int = 1,
    in_place: bool = False,
) -> Tensor:
    """Return dropout(x) of x (B, L, E), or dropout(relu(x)), bit-identical to `ops.random` in torch. rows: (B, L)
    int64. stream: tensor to which sign times the result is added, with in_place overwritten.
    """
    x = x.contiguous()
    rows = rows.contiguous()
    stream = None if stream is None else stream.contiguous()
    out = stream if in_place and stream is not None else empty_like(x, dtype=dtype)
    count = rows.numel()
    width = x.shape[-1]
    columns = min(_LARGEST_COLUMNS, triton.next_power_of_2(width))
    tall = _NUMBERS // columns
    grid = (-(-count // tall), -(-width // columns))
    low, high = halves(key)
    launch(
        _dropout, grid, x=x, rows=rows, stream=stream, out=out, count=count, width=width, low=low, high=high,
        threshold=least_kept(rate), scale=1.0 / (1.0 - rate), SIGN=sign, RELU=relu, ROWS=tall, COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["scale"])
def _relu_gradient(grad, out, dx, count, scale, NUMBERS: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = offset < count
    value = tl.load(grad + offset, mask=inside, other=0).to(tl.float32) * scale
    positive = tl.load(out + offset, mask=inside, other=0) > 0
    tl.store(dx + offset, tl.where(positive, value, 0.0).to(dx.dtype.element_ty), mask=inside)


def relu_gradient(grad: Tensor, out: Tensor, scale: float) -> Tensor:
    """Return scale·grad where `out` is positive, else 0: the gradient of dropout(relu(x)) with result `out`."""
    grad = grad.contiguous()
    dx = empty_like(out)
    grid = (-(-out.numel() // _NUMBERS),)
    launch(_relu_gradient, grid, grad=grad, out=out, dx=dx, count=out.numel(), scale=scale, NUMBERS=_NUMBERS)
    return dx


@triton.jit(do_not_specialize=["first", "low", "high", "count"])
def _bits(rows, out, columns, low, high, first, count, COLUMNS: tl.constexpr):
    """Draw bits. rows: row numbers, or None for `count` rows per head from `first` on."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    low, high = key_halves(low, high)
    number = (first + row // count) * 65536 + row % count if rows is None else tl.load(rows + row)
    seed = row_seed(number, low, high)
    tl.store(out + row * columns + column, _bits_of(seed, column, high), mask=column < columns)


def bits(key: Key, rows: Tensor, columns: int) -> Tensor:
    """Compute `ops.random.random_bits` in one launch, bit-identical."""
    out = rows.new_empty(*rows.shape, columns, dtype=torch.int32)
    return _draw_bits(out, rows.contiguous(), key, 0, 1)


def bits_by_head(key: Key, heads: range, count: int, columns: int, device: torch.device) -> Tensor:
    """Compute `ops.random.bits_by_head` in one launch, bit-identical."""
    out = torch.empty(len(heads), count, columns, dtype=torch.int32, device=device)
    return _draw_bits(out, None, key, heads.start, count)


def _draw_bits(out: Tensor, rows: Tensor | None, key: Key, first: int, count: int) -> Tensor:
    columns = out.shape[-1]
    grid = (out.numel() // max(1, columns), -(-columns // _LARGEST_COLUMNS))
    low, high = halves(key)
    launch(
        _bits, grid, rows=rows, out=out, columns=columns, low=low, high=high, first=first, count=count,
        COLUMNS=min(_LARGEST_COLUMNS, triton.next_power_of_2(columns)),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first", "low", "high", "other_low", "other_high", "count"])
def _normals(out, first, count, columns, low, high, other_low, other_high, COLUMNS: tl.constexpr):
    """Draw normal numbers. low, high: key of the radius. other_low, other_high: key of the angle."""
    pair = tl.program_id(0)
    row = (first + pair // count).to(tl.int64) * 65536 + pair % count
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    low, high = key_halves(low, high)
    other_low, other_high = key_halves(other_low, other_high)
    radius = _bits_of(row_seed(row, low, high), column, high).to(tl.float64)
    angle = _bits_of(row_seed(row, other_low, other_high), column, other_high).to(tl.float64)
    length = tl.sqrt(-2.0 * tl.log((radius + 2147483648.5) * _SCALE))
    number = length * tl.cos(angle * _TURN)
    tl.store(out + pair.to(tl.int64) * columns + column, number.to(tl.float32), mask=column < columns)


def normals(key: Key, heads: range, count: int, columns: int, device: torch.device) -> Tensor:
    """Compute `ops.random.normal_by_head` in one launch, equal up to rounding."""
    out = torch.empty(len(heads), count, columns, dtype=torch.float32, device=device)
    grid = (len(heads) * count, -(-columns // _LARGEST_COLUMNS))
    low, high = halves(subkey(key, "radius"))
    other_low, other_high = halves(subkey(key, "angle"))
    launch(
        _normals, grid, out=out, first=heads.start, count=count, columns=columns, low=low, high=high,
        other_low=other_low, other_high=other_high, COLUMNS=_LARGEST_COLUMNS,
    )  # fmt: skip
    return out
