"""One pass of a counting sort, on the device: count the digits of each tile, add up, and place every token.

L length, N digits (a power of two), T tiles of a row. counts (rows, T, N) holds how often each digit occurs in a tile,
then how many tokens of the row with that digit stand in earlier tiles; totals (rows, N) how often it occurs in the row.
"""

import triton
import triton.language as tl


@triton.jit
def _digits(keys, order, places, valid, shift, DIGITS: tl.constexpr):
    """The positions of the tokens at `places` of the order so far (None: as they come), their digits and keys."""
    tokens = places
    if order is not None:
        tokens = tl.load(order + places, mask=valid, other=0)
    key = tl.load(keys + tokens, mask=valid, other=0)
    return tokens, (key.to(tl.int32) >> shift) & (DIGITS - 1), key


@triton.jit
def count(keys, order, counts, length, tiles, shift, DIGITS: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row, tile = program // tiles, program % tiles
    if order is not None:
        order += row * length
    places = (tile * TILE).to(tl.int32) + tl.arange(0, TILE)
    valid = places < length
    _, digits, _ = _digits(keys + row * length, order, places, valid, shift, DIGITS)
    tl.store(counts + program * DIGITS + tl.arange(0, DIGITS), tl.histogram(digits, DIGITS, valid))


@triton.jit
def add_up(counts, totals, tiles, DIGITS: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr):
    """Sums the counts of WIDE digits of a row over its earlier tiles, in place, TILES tiles at a time."""
    row = tl.program_id(0).to(tl.int64)
    digits = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    counts += row * tiles * DIGITS
    before = tl.zeros([WIDE], tl.int32)
    first = 0
    while first < tiles:
        tile = first + tl.arange(0, TILES)
        places = counts + tile[:, None] * DIGITS + digits[None, :]
        valid = (tile < tiles)[:, None]
        found = tl.load(places, mask=valid, other=0)
        tl.store(places, before[None, :] + tl.cumsum(found, 0) - found, mask=valid)
        before += tl.sum(found, 0)
        first += TILES
    tl.store(totals + row * DIGITS + digits, before)


@triton.jit
def place(
    keys, order, counts, totals, out, ordered, length, tiles, shift, DIGITS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """A token's place: all smaller digits of the row, its own digit in earlier tiles, in earlier blocks of BLOCK tokens
    of this tile, and before it in its block. ordered: takes the keys in order, or None. REVERSED: places are
    counted from the last one.
    """
    program = tl.program_id(0).to(tl.int64)
    row, tile = program // tiles, (program % tiles).to(tl.int32)
    keys, out = keys + row * length, out + row * length
    if order is not None:
        order += row * length
    every, inside = tl.arange(0, DIGITS), tl.arange(0, BLOCK)
    total = tl.load(totals + row * DIGITS + every)
    next_place = tl.cumsum(total, 0) - total + tl.load(counts + program * DIGITS + every)
    earlier = inside[None, :] < inside[:, None]
    first = tile * TILE
    last = min(first + TILE, length)
    while first < last:
        valid = first + inside < length
        tokens, digits, key = _digits(keys, order, first + inside, valid, shift, DIGITS)
        rank = tl.sum(((digits[:, None] == digits[None, :]) & earlier).to(tl.int32), 1)
        at = tl.gather(next_place, digits, 0) + rank
        if REVERSED:
            at = length - 1 - at
        tl.store(out + at, tokens, mask=valid)
        if ordered is not None:
            tl.store(ordered + row * length + at, key, mask=valid)
        next_place += tl.histogram(digits, DIGITS, valid)
        first += BLOCK
