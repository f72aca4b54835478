"""Stable counting sort as Triton kernels: passes over digits of up to 11 bits, least significant first.

A pass counts the digits of each tile, computes prefix sums, and scatters the tokens. N digits (a power of two), T tiles
of a row. counts (rows, T, N): occurrences of each digit in a tile, then in all earlier tiles. totals (rows, N): in the
row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megasparse.ops.kernels import launch


@triton.jit
def _digits(keys, order, slots, valid, shift, DIGITS: tl.constexpr):
    """Return the tokens at `slots` of the order (None: original), their digits and keys."""
    tokens = slots
    if order is not None:
        tokens = tl.load(order + slots, mask=valid, other=0)
    key = tl.load(keys + tokens, mask=valid, other=0)
    return tokens, (key.to(tl.int32) >> shift) & (DIGITS - 1), key


@triton.jit(do_not_specialize=["tiles", "shift"])
def count(keys, order, counts, length, tiles, shift, DIGITS: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    tile = program % tiles
    if order is not None:
        order += row * length
    slots = (tile * TILE).to(tl.int32) + tl.arange(0, TILE)
    valid = slots < length
    _, digits, _ = _digits(keys + row * length, order, slots, valid, shift, DIGITS)
    tl.store(counts + program * DIGITS + tl.arange(0, DIGITS), tl.histogram(digits, DIGITS, valid))


@triton.jit(do_not_specialize=["tiles"])
def add_up(counts, totals, tiles, DIGITS: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr):
    """Compute exclusive prefix sums over tiles of the counts of WIDE digits, in place, TILES tiles at a time."""
    row = tl.program_id(0).to(tl.int64)
    digits = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    counts += row * tiles * DIGITS
    before = tl.zeros([WIDE], tl.int32)
    first = 0
    while first < tiles:
        tile = first + tl.arange(0, TILES)
        address = counts + tile[:, None] * DIGITS + digits[None, :]
        valid = (tile < tiles)[:, None]
        counted = tl.load(address, mask=valid, other=0)
        tl.store(address, before[None, :] + tl.cumsum(counted, 0) - counted, mask=valid)
        before += tl.sum(counted, 0)
        first += TILES
    tl.store(totals + row * DIGITS + digits, before)


@triton.jit(do_not_specialize=["length", "tiles", "shift"])
def place(
    keys, order, counts, totals, out, ordered, length, tiles, shift, DIGITS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """Scatter tokens. A token's index is the number of smaller digits in the row, plus equal digits in earlier tiles,
    in earlier blocks of BLOCK tokens of this tile, and before it in its block. ordered: sorted keys, or None.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    tile = (program % tiles).to(tl.int32)
    keys = keys + row * length
    out = out + row * length
    if order is not None:
        order += row * length
    digit = tl.arange(0, DIGITS)
    inside = tl.arange(0, BLOCK)
    total = tl.load(totals + row * DIGITS + digit)
    next_place = tl.cumsum(total, 0) - total + tl.load(counts + program * DIGITS + digit)
    earlier = inside[None, :] < inside[:, None]
    first = tile * TILE
    last = min(first + TILE, length)
    while first < last:
        valid = first + inside < length
        tokens, digits, key = _digits(keys, order, first + inside, valid, shift, DIGITS)
        rank = tl.sum(((digits[:, None] == digits[None, :]) & earlier).to(tl.int32), 1)
        slot = tl.gather(next_place, digits, 0) + rank
        if REVERSED:
            slot = length - 1 - slot
        tl.store(out + slot, tokens, mask=valid)
        if ordered is not None:
            tl.store(ordered + row * length + slot, key, mask=valid)
        next_place += tl.histogram(digits, DIGITS, valid)
        first += BLOCK


_DIGIT_BITS = 11  # sorts the buckets of 64K tokens in one pass
_FEWEST = 32  # digits per pass: Triton's histograms need as many bins as a warp has lanes
_TILE = 1024  # tokens per row of counts: at most 4 KB for 4 KB of indices; four times as many for 11 bits
_BLOCK = 64  # tokens that are ranked against each other
_TILES_AT_ONCE = 128
_WIDE = 8  # digits per program: 32 B, the smallest memory transaction of GPUs


def counting_sort(keys: Tensor, bits: int, ordered: Tensor | None = None, reverse: bool = False) -> Tensor:
    """Compute `counting_sort.counting_sort`. Strided keys are copied once."""
    keys = keys.contiguous()
    rows, length = keys.shape
    passes = -(-bits // _DIGIT_BITS)
    digit_bits = -(-bits // passes)
    digits = max(_FEWEST, 1 << digit_bits)
    tile = _TILE if digits <= _TILE else 4 * _TILE
    tiles = -(-length // tile)
    counts = keys.new_empty(rows, tiles, digits, dtype=torch.int32)
    totals = keys.new_empty(rows, digits, dtype=torch.int32)
    order: Tensor | None = None
    for shift in range(0, bits, digit_bits):
        out = keys.new_empty(rows, length, dtype=torch.int32)
        shared = {"keys": keys, "order": order, "counts": counts, "length": length, "tiles": tiles, "shift": shift}
        shared |= {"DIGITS": digits, "TILE": tile}
        launch(count, (rows * tiles,), **shared)
        launch(
            add_up, (rows, digits // _WIDE), counts=counts, totals=totals, tiles=tiles, DIGITS=digits, WIDE=_WIDE,
            TILES=_TILES_AT_ONCE,
        )  # fmt: skip
        last = shift + digit_bits >= bits
        launch(
            place, (rows * tiles,), **shared, totals=totals, out=out, ordered=ordered if last else None, BLOCK=_BLOCK,
            REVERSED=reverse and last, num_warps=2,
        )  # fmt: skip
        order = out
    assert order is not None
    return order
