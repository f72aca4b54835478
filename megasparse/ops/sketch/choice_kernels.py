"""Device code of the choice: the best keys of each row, streaming. Vectors come as in kernels.py.

A program is one warp with a few rows of one head. It keeps their best keys and passes over the others in order of
position: a later key has to beat the worst kept, which after the first tiles few do.

B batch, H heads, Lq queries, Lk keys, d width of the sketch, K keys a query chooses.
"""

import triton
import triton.language as tl

from megasparse.ops.kernels import mix
from megasparse.ops.sketch.kernels import document_of, product, sight, vectors

_STEPS = tl.constexpr(256.0)
_HALVES = tl.constexpr(12582912.0)  # 1.5·2^23: adding it leaves no place for a fraction
_LAST = tl.constexpr((1 << 31) - 1)
_TAKEN = tl.constexpr(-(1 << 31))  # below every rank


@triton.jit
def rounded(score):
    """The nearest multiple of 1/256, halves to even ones; from 2^14 on fp32 is as coarse by itself."""
    steps = score * _STEPS
    return tl.where(tl.abs(steps) < 4194304.0, (steps + _HALVES) - _HALVES, steps)


@triton.jit
def likelihood(score, lse, SAMPLING: tl.constexpr):
    """Return p, or of "raw" its logarithm, which has a greater range."""
    if SAMPLING == "raw":
        p = score
    elif SAMPLING == "random":
        p = tl.full(score.shape, 1.0, tl.float32)
    else:
        root = tl.rsqrt(tl.maximum(lse - score, 0.0))  # below 0 only by rounding; by roots for want of a fast 1/x
        p = root * root
        if SAMPLING == "inverse_log_squared":
            p = p * p
    return p


@triton.jit
def ranked(score, SIGNED: tl.constexpr):
    """Return int32 numbers in the order of the scores: a warp finds the largest of them in one instruction. Not SIGNED,
    no score is below 0 but −∞."""
    if SIGNED:
        bits = (score + 0.0).to(tl.int32, bitcast=True)  # −0 becomes 0
        rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        rank = score.to(tl.int32, bitcast=True)
    return rank


@triton.jit
def row_seeds(seeds, number):
    """`ops.random._seeds` of rows, and what columns are shifted by. seeds: the two halves of the key."""
    key_low, key_high = tl.load(seeds).to(tl.uint32, bitcast=True), tl.load(seeds + 1).to(tl.uint32, bitcast=True)
    low, high = number.to(tl.uint32) + key_low, (number >> 32).to(tl.uint32) + key_high
    return mix(mix(low) ^ mix(high)), key_high


@triton.jit
def uniform(row, column):
    """`ops.random.random_bits` as one of the 2^23 numbers (n + ½)/2^23, exactly."""
    bits = mix(row[:, None] + column[None, :])
    above_one = ((bits >> 9) ^ 0x400000) | 0x3F800000  # 1 + n/2^23; random_bits is signed: its top bit is the other
    return above_one.to(tl.float32, bitcast=True) - 0.99999994039535522


@triton.jit
def insert(rank, keys, best, index, worst):
    """Puts each row's highest rank (ROWS, COLUMNS), where it beats the worst kept, into that one's place and takes it
    out of `rank`. Of equal ranks the first is put in, and of equal worst ones the last is put out.
    """
    highest = tl.max(rank, 1)
    beats = highest > worst
    key = tl.min(tl.where(rank == highest[:, None], keys[None, :], _LAST), 1)
    out = tl.max(tl.where(best == worst[:, None], index, -_LAST), 1)
    place = (index == out[:, None]) & beats[:, None]
    best, index = tl.where(place, highest[:, None], best), tl.where(place, key[:, None], index)
    rank = tl.where((keys[None, :] == key[:, None]) & beats[:, None], _TAKEN, rank)
    return rank, best, index, tl.min(best, 1)


@triton.jit
def write(out, rows, queries, best, index, COUNT: tl.constexpr):
    """Rows of `out` (Lq, K), best first, of equal ranks the smaller key; −1 where nothing was found."""
    for place in range(COUNT):
        highest = tl.max(best, 1)
        key = tl.min(tl.where(best == highest[:, None], index, _LAST), 1)
        tl.store(out + rows.to(tl.int64) * COUNT + place, tl.maximum(key, -1), mask=rows < queries)
        taken = index == key[:, None]
        best, index = tl.where(taken, _TAKEN, best), tl.where(taken, _LAST, index)


@triton.jit(do_not_specialize=["queries", "first_query"])  # decoding changes them at every token
def choose(
    q, k, lse, documents, numbers, seeds, out, queries, length, first_query,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, COUNT: tl.constexpr, SAMPLING: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Compute out (B, H, Lq, K) int32 of a program's rows. numbers: (B, Lq) int64, of the rows. seeds: (H, tiles, 2)
    int32, the halves of the keys of every head and tile of TILE keys; None for nothing drawn. PLACES: K, up to a power
    of two.
    """
    batch, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # causal rows that see most start first
    rows, columns, places = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, PLACES)
    inside = rows < queries
    if documents is not None:
        documents += batch * length
    k += batch * WIDTH * length
    query = vectors(q + batch * WIDTH * queries, rows, queries, WIDTH)
    last, document = sight(rows + first_query, documents, length, CAUSAL)
    last = tl.where(inside, last, -1)
    if lse is not None:
        own_lse = tl.load(lse + batch * queries + rows, mask=inside, other=0.0)
    else:
        own_lse = tl.zeros((ROWS,), tl.float32)
    SIGNED: tl.constexpr = seeds is None or SAMPLING == "raw"
    worst = ranked(tl.full((ROWS,), -float("inf"), tl.float32), SIGNED)
    # Empty places count down from −1, so that each is another; those beyond K are never the worst.
    index = tl.zeros((ROWS, 1), tl.int32) - 1 - places[None, :]
    best = tl.where(index >= -COUNT, worst[:, None], _LAST)
    end = tl.max(last, 0) + 1
    for first_key in range(0, end, TILE):
        if seeds is not None:
            number = tl.load(numbers + batch * queries + rows, mask=inside, other=0)
            row, shift = row_seeds(seeds + (head * ((length + TILE - 1) // TILE) + first_key // TILE) * 2, number)
        for start in range(first_key, tl.minimum(end, first_key + TILE), COLUMNS):
            keys = start + columns
            score = product(query, vectors(k, keys, length, WIDTH), WIDTH)
            score = rounded(score) if seeds is None else likelihood(score, own_lse[:, None], SAMPLING)
            seen = (keys[None, :] <= last[:, None]) & (keys < first_key + TILE)[None, :]
            seen &= document[:, None] == document_of(keys, documents, length)[None, :]
            score = tl.where(seen, score, -float("inf"))
            rank = ranked(score, SIGNED)
            promising = tl.max((rank > worst[:, None]).to(tl.int32))
            if promising > 0:  # u < 1: else nothing drawn could beat what is kept
                if seeds is not None:
                    u = uniform(row, mix((keys - first_key).to(tl.uint32) + shift))
                    rank = ranked(score + tl.log(u) if SAMPLING == "raw" else score * u, SIGNED)
                    promising = tl.max((rank > worst[:, None]).to(tl.int32))
                while promising > 0:
                    rank, best, index, worst = insert(rank, keys, best, index, worst)
                    promising = tl.max((rank > worst[:, None]).to(tl.int32))
    best = tl.where(places[None, :] < COUNT, best, _TAKEN)
    index = tl.where(places[None, :] < COUNT, index, _LAST)
    write(out + tl.program_id(1).to(tl.int64) * queries * COUNT, rows, queries, best, index, COUNT)
