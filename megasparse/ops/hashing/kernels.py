"""Bucket codes and sign codes on the device: projections stay in registers, codes alone are written.

x (B, H, L, D) of any strides but 1 along D; codes (B, H, rounds or hashes, L). All products are fp32 and exact (IEEE):
a bucket must not depend on whether TF32 is allowed.
"""

import triton
import triton.language as tl

from megasparse.ops.kernels import dot


@triton.jit
def _vectors(x, row, heads, batch_stride, head_stride):
    """The address at which the vectors of batch and head number `row` begin."""
    return x + (row // heads) * batch_stride + (row % heads) * head_stride


@triton.jit
def _projected(x, token, length, stride, matrix, columns, last, matrix_stride, D: tl.constexpr, DEPTH: tl.constexpr):
    """The products of `token`'s vectors with matrix (D, `last`) in `columns`, fp32: D in pieces of DEPTH, as an exact
    product keeps whole rows of its factors in registers.
    """
    depth = tl.arange(0, DEPTH)
    score = tl.zeros([token.shape[0], columns.shape[0]], tl.float32)
    for first in range(0, D, DEPTH):
        d = first + depth
        inside = (token < length)[:, None] & (d < D)[None, :]
        a = tl.load(x + token.to(tl.int64)[:, None] * stride + d[None, :], mask=inside, other=0).to(tl.float32)
        inside = (d < D)[:, None] & (columns < last)[None, :]
        b = tl.load(matrix + d[:, None] * matrix_stride + columns[None, :], mask=inside, other=0)
        score += dot(a, b, "ieee")
    return score


@triton.jit
def angular(
    x, rotations, codes, length, heads, rounds, batch_stride, head_stride, stride, columns, FACTORS: tl.constexpr,
    D: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Codes of TOKENS tokens of a row in a round: for each factor, the first of the largest of [xR; −xR]. rotations:
    (H, R, D, `columns`). The rounds of the same tokens are neighbours, so that they find x in the cache.
    """
    program, tiles = tl.program_id(0), tl.cdiv(length, TOKENS)
    round_, tile, row = program % rounds, program // rounds % tiles, (program // rounds // tiles).to(tl.int64)
    x = _vectors(x, row, heads, batch_stride, head_stride)
    matrix = rotations + ((row % heads) * rounds + round_) * D * columns
    token = tile * TOKENS + tl.arange(0, TOKENS)
    code = tl.zeros([TOKENS], tl.int32)
    for f in tl.static_range(len(FACTORS)):
        half = FACTORS[f] // 2
        high = tl.full([TOKENS], float("-inf"), tl.float32)
        low = tl.full([TOKENS], float("inf"), tl.float32)
        high_at = tl.zeros([TOKENS], tl.int32)
        low_at = tl.zeros([TOKENS], tl.int32)
        for first in range(0, half, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            score = _projected(x, token, length, stride, matrix, column, half, columns, D, DEPTH)
            inside = (column < half)[None, :]
            found, at = tl.max(tl.where(inside, score, float("-inf")), 1, return_indices=True)
            high_at = tl.where(found > high, first + at, high_at)
            high = tl.maximum(high, found)
            found, at = tl.min(tl.where(inside, score, float("inf")), 1, return_indices=True)
            low_at = tl.where(found < low, first + at, low_at)
            low = tl.minimum(low, found)
        code = code * FACTORS[f] + tl.where(high >= -low, high_at, low_at + half)
        matrix += half
    place = codes + (row * rounds + round_) * length + token
    tl.store(place, code.to(codes.dtype.element_ty), mask=token < length)


@triton.jit
def hidden_units(
    x, weight, bias, out, length, heads, batch_stride, head_stride, stride, width, first, D: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Numbers first to first + D of the rows of out (B·H, L, `width`): relu(xW + b) of TOKENS tokens of a row, in
    COLUMNS of the D units. weight: (H, D, D). bias: (H, D).
    """
    program, tiles, groups = tl.program_id(0), tl.cdiv(length, TOKENS), tl.cdiv(D, COLUMNS)
    group, tile, row = program % groups, program // groups % tiles, (program // groups // tiles).to(tl.int64)
    x = _vectors(x, row, heads, batch_stride, head_stride)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    unit = group * COLUMNS + tl.arange(0, COLUMNS)
    head = row % heads
    score = _projected(x, token, length, stride, weight + head * D * D, unit, D, D, D, DEPTH)
    score += tl.load(bias + head * D + unit, mask=unit < D, other=0)[None, :]
    place = out + (row * length + token)[:, None] * width + first + unit[None, :]
    tl.store(place, tl.maximum(score, 0.0), mask=(token < length)[:, None] & (unit < D)[None, :])


@triton.jit
def best_bucket(
    x, weight, bias, codes, length, heads, buckets, D: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """The first of the largest of xW + b, of TOKENS tokens of a row. x: (B·H, L, D). weight: (H, D, `buckets`). bias:
    (H, `buckets`).
    """
    program, tiles = tl.program_id(0), tl.cdiv(length, TOKENS)
    tile, row = program % tiles, (program // tiles).to(tl.int64)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    x += row * length * D
    weight += (row % heads) * D * buckets
    bias += (row % heads) * buckets
    high = tl.full([TOKENS], float("-inf"), tl.float32)
    code = tl.zeros([TOKENS], tl.int32)
    for first in range(0, buckets, COLUMNS):
        bucket = first + tl.arange(0, COLUMNS)
        score = _projected(x, token, length, D, weight, bucket, buckets, buckets, D, DEPTH)
        score += tl.load(bias + bucket, mask=bucket < buckets, other=float("-inf"))[None, :]
        found, at = tl.max(score, 1, return_indices=True)
        code = tl.where(found > high, first + at, code)
        high = tl.maximum(high, found)
    tl.store(codes + row * length + token, code.to(codes.dtype.element_ty), mask=token < length)


@triton.jit
def sides(
    x, normals, codes, length, heads, hashes, bits, batch_stride, head_stride, stride, D: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Codes of TOKENS tokens of a row in COLUMNS hashes: bit t is [r·x >= 0], normals r (H, τ, D, m)."""
    program, tiles, groups = tl.program_id(0), tl.cdiv(length, TOKENS), tl.cdiv(hashes, COLUMNS)
    group, tile, row = program % groups, program // groups % tiles, (program // groups // tiles).to(tl.int64)
    x = _vectors(x, row, heads, batch_stride, head_stride)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    hash_ = group * COLUMNS + tl.arange(0, COLUMNS)
    normals += (row % heads) * bits * D * hashes
    code = tl.zeros([TOKENS, COLUMNS], tl.int32)
    bit = 0
    while bit < bits:
        score = _projected(x, token, length, stride, normals, hash_, hashes, hashes, D, DEPTH)
        code |= (score >= 0).to(tl.int32) << bit
        normals += D * hashes
        bit += 1
    place = codes + (row * hashes + hash_)[None, :] * length + token[:, None]
    inside = (token < length)[:, None] & (hash_ < hashes)[None, :]
    tl.store(place, code.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def _hadamard(x, LEVELS: tl.constexpr):
    """H along the first of two dimensions, of size 2^LEVELS. Each level takes sums and differences of neighbours and
    moves their bit of the index to the front: after all of them it is in its place again. It adds the same pairs in the
    same order as `sign.hadamard`. Where a thread has all of a token it happens in registers.
    """
    P: tl.constexpr = x.shape[0]
    TOKENS: tl.constexpr = x.shape[1]
    for _ in tl.static_range(LEVELS):
        a, b = tl.split(tl.permute(tl.reshape(x, [P // 2, 2, TOKENS]), [0, 2, 1]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), [2, 0, 1]), [P, TOKENS])
    return x


@triton.jit
def _part(x, part, LEVELS: tl.constexpr, PARTS_LEVELS: tl.constexpr, FIRST: tl.constexpr):
    """Rows [part·n, part·n + n) of x (2^LEVELS, TOKENS), of 2^PARTS_LEVELS equal parts; FIRST: part is 0, and what only
    the other parts need is never computed.
    """
    for level in tl.static_range(PARTS_LEVELS):
        a, b = tl.split(tl.permute(tl.reshape(x, [2, 1 << (LEVELS - level - 1), x.shape[1]]), [1, 2, 0]))
        x = a if FIRST else tl.where((part >> (PARTS_LEVELS - level - 1)) & 1 == 1, b, a)
    return x


@triton.jit
def transformed_sides(
    x, diagonals, codes, length, heads, hashes, bits, batch_stride, head_stride, stride, again, D: tl.constexpr,
    LEVELS: tl.constexpr, PARTS_LEVELS: tl.constexpr, FIRST: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Codes of TOKENS tokens of a row in one part of a group's P = 2^LEVELS hashes: bit t is the sign of a coordinate
    of HD₃HD₂HD₁x, diagonals (H, groups, τ, 3, P): −1 where
    negative, else 1. `again` is 0: x's address then depends on the bit, so that x is
    read again (from the cache) for each instead of taking D registers all along.
    """
    P: tl.constexpr = 1 << LEVELS
    PARTS: tl.constexpr = 1 << PARTS_LEVELS
    HASHES: tl.constexpr = P // PARTS
    used, groups = tl.cdiv(hashes, HASHES), tl.cdiv(hashes, P)
    program, tiles = tl.program_id(0), tl.cdiv(length, TOKENS)
    part, tile, row = program % used, program // used % tiles, (program // used // tiles).to(tl.int64)
    x = _vectors(x, row, heads, batch_stride, head_stride) + (tile * TOKENS).to(tl.int64) * stride
    inside, d = tl.arange(0, TOKENS), tl.arange(0, P)
    token = tile * TOKENS + inside
    places = inside[None, :] * stride + d[:, None]
    valid = (token < length)[None, :]
    if D < P:
        valid &= (d < D)[:, None]
    diagonals += ((row % heads) * groups + part // PARTS) * bits * (3 * P)
    code = tl.zeros([HASHES, TOKENS], tl.int32)
    bit = 0
    while bit < bits:
        y = tl.load(x + bit * again + places, mask=valid, other=0).to(tl.float32)
        for number in tl.static_range(3):
            sign = tl.where(tl.load(diagonals + number * P + d) < 0, -1.0, 1.0)
            y = _hadamard(y * sign[:, None], LEVELS)
        code |= (_part(y, part % PARTS, LEVELS, PARTS_LEVELS, FIRST) >= 0).to(tl.int32) << bit
        diagonals += 3 * P
        bit += 1
    hash_ = part * HASHES + tl.arange(0, HASHES)
    place = codes + (row * hashes + hash_)[:, None] * length + token[None, :]
    valid = (hash_ < hashes)[:, None] & (token < length)[None, :]
    tl.store(place, code.to(codes.dtype.element_ty), mask=valid)
