"""Dropout in one pass over x, on the device and the host. E width of a row."""

import triton
import triton.language as tl
from torch import Tensor, empty_like

from megasparse.ops.kernels import launch, mix

_NUMBERS = 4096  # of a program
_LARGEST_COLUMNS = 1024


@triton.jit(do_not_specialize=["low", "high", "threshold", "scale"])
def _dropout(
    x, rows, out, count, width, low, high, threshold, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Row by row what `ops.random.random_bits` draws; an element stays where its bits are at least `threshold`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] & (column < width)[None, :]
    low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    number = tl.load(rows + row, mask=row < count, other=0)
    row_seed = mix(mix(number.to(tl.uint32) + low) ^ mix((number >> 32).to(tl.uint32) + high))
    column_seed = mix(column.to(tl.uint32) + high)
    bits = mix(row_seed[:, None] + column_seed[None, :]).to(tl.int32, bitcast=True)
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(x + place, mask=inside, other=0)
    dropped = value.to(tl.float32) * tl.where(bits >= threshold, scale, 0.0)
    tl.store(out + place, dropped.to(value.dtype), mask=inside)


def drop(x: Tensor, rate: float, low: int, high: int, threshold: int, rows: Tensor) -> Tensor:
    """Return x (B, L, E) with the elements zeroed whose bits are below `threshold`, the rest scaled by 1/(1 − rate);
    the same to the bit as `ops.random` in torch. low, high: the key's halves, signed; rows: (B, L) int64.

    Cost: x is read and written once, 2·B·L·E·bytes and 8·B·L of rows; about 12 integer operations an element.
    """
    x, rows = x.contiguous(), rows.contiguous()
    out = empty_like(x)
    count, width = rows.numel(), x.shape[-1]
    columns = min(_LARGEST_COLUMNS, triton.next_power_of_2(width))
    tall = _NUMBERS // columns
    grid = (-(-count // tall), -(-width // columns))
    arguments = (x, rows, out, count, width, low, high, threshold, 1.0 / (1.0 - rate))
    launch(_dropout, grid, *arguments, ROWS=tall, COLUMNS=columns, num_warps=4)
    return out
