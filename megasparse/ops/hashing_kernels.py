"""Kernels of `hashing`, which write only the codes. x (B, H, L, D) has any strides except 1 along D; codes are (B, H,
rounds or hashes, L). Every product is the sum of three TF32 products, precise to about 22 bits.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megasparse.ops.hashing import Kind, code_dtype, hash_planes
from megasparse.ops.kernels import block, dot, launch, strides, whole_vectors
from megasparse.ops.random import Key

_WARPS = 4
_COORDINATES = 64 * 32 * _WARPS  # coordinates per program: 64 per thread; up to P = 64 threads exchange nothing
_HASHES = 64  # hashes per program


@triton.jit
def _place(groups, length, TOKENS: tl.constexpr):
    """Return a program's group, the neighbours of which share tokens, its row, and its tokens."""
    program = tl.program_id(0)
    tiles = tl.cdiv(length, TOKENS)
    tile = program // groups % tiles
    row = (program // groups // tiles).to(tl.int64)
    return program % groups, row, tile * TOKENS + tl.arange(0, TOKENS)


@triton.jit
def _vectors(x, row, heads, x_batch, x_head):
    """Return the address of the first vector of batch and head number `row`."""
    return x + (row // heads) * x_batch + (row % heads) * x_head


@triton.jit
def _projected(x, token, length, x_stride, matrix, columns, last, matrix_stride, D: tl.constexpr, DEPTH: tl.constexpr):
    """Return products of `token`'s vectors with `columns` of matrix (D, `last`), fp32, in pieces of DEPTH along D."""
    depth = tl.arange(0, DEPTH)
    score = tl.zeros([token.shape[0], columns.shape[0]], tl.float32)
    for first in range(0, D, DEPTH):
        d = first + depth
        inside = (token < length)[:, None] & (d < D)[None, :]
        a = tl.load(x + token.to(tl.int64)[:, None] * x_stride + d[None, :], mask=inside, other=0).to(tl.float32)
        inside = (d < D)[:, None] & (columns < last)[None, :]
        b = tl.load(matrix + d[:, None] * matrix_stride + columns[None, :], mask=inside, other=0).to(tl.float32)
        score += dot(a, b, "tf32x3")
    return score


@triton.jit(do_not_specialize=["length", "heads", "rounds"])
def angular(
    x, rotations, codes, length, heads, rounds, x_batch, x_head, x_stride, columns, FACTORS: tl.constexpr,
    D: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute codes of TOKENS tokens of a row in a round: for each factor, the first maximum of [xR; −xR]. rotations:
    (H, R, D, `columns`). Rounds of the same tokens are neighbouring programs.
    """
    round_, row, token = _place(rounds, length, TOKENS)
    x = _vectors(x, row, heads, x_batch, x_head)
    matrix = rotations + ((row % heads) * rounds + round_) * D * columns
    code = tl.zeros([TOKENS], tl.int32)
    for f in tl.static_range(len(FACTORS)):
        half = FACTORS[f] // 2
        high = tl.full([TOKENS], float("-inf"), tl.float32)
        low = tl.full([TOKENS], float("inf"), tl.float32)
        high_at = tl.zeros([TOKENS], tl.int32)
        low_at = tl.zeros([TOKENS], tl.int32)
        for first in range(0, half, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            score = _projected(x, token, length, x_stride, matrix, column, half, columns, D, DEPTH)
            inside = (column < half)[None, :]
            best, at = tl.max(tl.where(inside, score, float("-inf")), 1, return_indices=True)
            high_at = tl.where(best > high, first + at, high_at)
            high = tl.maximum(high, best)
            best, at = tl.min(tl.where(inside, score, float("inf")), 1, return_indices=True)
            low_at = tl.where(best < low, first + at, low_at)
            low = tl.minimum(low, best)
        code = code * FACTORS[f] + tl.where(high >= -low, high_at, low_at + half)
        matrix += half
    address = codes + (row * rounds + round_) * length + token
    tl.store(address, code.to(codes.dtype.element_ty), mask=token < length)


@triton.jit(do_not_specialize=["length", "heads"])
def hidden_units(
    x, weight, bias, out, length, heads, x_batch, x_head, x_stride, width, first, D: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute relu(xW + b) of TOKENS tokens of a row, for COLUMNS of the D units, into out (B·H, L, `width`) from
    column `first` on. weight: (H, D, D). bias: (H, D).
    """
    group, row, token = _place(tl.cdiv(D, COLUMNS), length, TOKENS)
    x = _vectors(x, row, heads, x_batch, x_head)
    unit = group * COLUMNS + tl.arange(0, COLUMNS)
    head = row % heads
    score = _projected(x, token, length, x_stride, weight + head * D * D, unit, D, D, D, DEPTH)
    score += tl.load(bias + head * D + unit, mask=unit < D, other=0)[None, :]
    address = out + (row * length + token)[:, None] * width + first + unit[None, :]
    tl.store(address, tl.maximum(score, 0.0), mask=(token < length)[:, None] & (unit < D)[None, :])


@triton.jit(do_not_specialize=["length", "heads"])
def best_bucket(
    x, weight, bias, codes, length, heads, buckets, D: tl.constexpr, BIASES: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute the first maximum of xW + Σb, for TOKENS tokens of a row. x: (B·H, L, D). weight: (H, D, `buckets`).
    bias: (BIASES, H, `buckets`).
    """
    _, row, token = _place(1, length, TOKENS)
    x += row * length * D
    weight += (row % heads) * D * buckets
    bias += (row % heads) * buckets
    high = tl.full([TOKENS], float("-inf"), tl.float32)
    code = tl.zeros([TOKENS], tl.int32)
    for first in range(0, buckets, COLUMNS):
        bucket = first + tl.arange(0, COLUMNS)
        score = _projected(x, token, length, D, weight, bucket, buckets, buckets, D, DEPTH)
        constant = tl.where(bucket < buckets, 0.0, float("-inf"))
        for number in tl.static_range(BIASES):
            address = bias + number * heads * buckets + bucket
            constant += tl.load(address, mask=bucket < buckets, other=0).to(tl.float32)
        best, at = tl.max(score + constant[None, :], 1, return_indices=True)
        code = tl.where(best > high, first + at, code)
        high = tl.maximum(high, best)
    tl.store(codes + row * length + token, code.to(codes.dtype.element_ty), mask=token < length)


@triton.jit(do_not_specialize=["heads", "bits"])
def sides(
    x, normals, codes, length, heads, hashes, bits, x_batch, x_head, x_stride, D: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute codes of TOKENS tokens of a row in COLUMNS hashes: bit t is [r·x >= 0], normals r (H, τ, D, m)."""
    group, row, token = _place(tl.cdiv(hashes, COLUMNS), length, TOKENS)
    x = _vectors(x, row, heads, x_batch, x_head)
    hash_ = group * COLUMNS + tl.arange(0, COLUMNS)
    normals += (row % heads) * bits * D * hashes
    code = tl.zeros([TOKENS, COLUMNS], tl.int32)
    bit = 0
    while bit < bits:
        score = _projected(x, token, length, x_stride, normals, hash_, hashes, hashes, D, DEPTH)
        code |= (score >= 0).to(tl.int32) << bit
        normals += D * hashes
        bit += 1
    address = codes + (row * hashes + hash_)[None, :] * length + token[:, None]
    inside = (token < length)[:, None] & (hash_ < hashes)[None, :]
    tl.store(address, code.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def _hadamard(x, LEVELS: tl.constexpr):
    """Apply H along the first of two dimensions, of size 2^LEVELS. Each level computes sums and differences of
    neighbours and moves their index bit to the front: the same pairs in the same order as in `hashing.hadamard`.
    """
    P: tl.constexpr = x.shape[0]
    TOKENS: tl.constexpr = x.shape[1]
    for _ in tl.static_range(LEVELS):
        a, b = tl.split(tl.permute(tl.reshape(x, [P // 2, 2, TOKENS]), [0, 2, 1]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), [2, 0, 1]), [P, TOKENS])
    return x


@triton.jit
def _part(x, part, LEVELS: tl.constexpr, PARTS_LEVELS: tl.constexpr, FIRST: tl.constexpr):
    """Return rows [part·n, part·n + n) of x (2^LEVELS, TOKENS), one of 2^PARTS_LEVELS parts. FIRST: part is 0."""
    for level in tl.static_range(PARTS_LEVELS):
        a, b = tl.split(tl.permute(tl.reshape(x, [2, 1 << (LEVELS - level - 1), x.shape[1]]), [1, 2, 0]))
        x = a if FIRST else tl.where((part >> (PARTS_LEVELS - level - 1)) & 1 == 1, b, a)
    return x


@triton.jit(do_not_specialize=["heads", "hashes", "bits"])
def transformed_sides(
    x, diagonals, codes, length, heads, hashes, bits, x_batch, x_head, x_stride, again, D: tl.constexpr,
    LEVELS: tl.constexpr, PARTS_LEVELS: tl.constexpr, FIRST: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute codes of TOKENS tokens of a row in one part of a group's P = 2^LEVELS hashes: bit t is the sign of a
    coordinate of HD₃HD₂HD₁x, diagonals (H, groups, τ, 3, P): negative numbers mean −1, others 1. `again` is 0: it makes
    x's address depend on the bit, so that x is reread from the cache instead of occupying D registers.
    """
    P: tl.constexpr = 1 << LEVELS
    PARTS: tl.constexpr = 1 << PARTS_LEVELS
    HASHES: tl.constexpr = P // PARTS
    part_count = tl.cdiv(hashes, HASHES)
    groups = tl.cdiv(hashes, P)
    program = tl.program_id(0)
    tiles = tl.cdiv(length, TOKENS)
    part = program % part_count
    tile = program // part_count % tiles
    row = (program // part_count // tiles).to(tl.int64)
    x = _vectors(x, row, heads, x_batch, x_head) + (tile * TOKENS).to(tl.int64) * x_stride
    inside = tl.arange(0, TOKENS)
    d = tl.arange(0, P)
    token = tile * TOKENS + inside
    places = inside[None, :] * x_stride + d[:, None]
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
    address = codes + (row * hashes + hash_)[:, None] * length + token[None, :]
    valid = (hash_ < hashes)[:, None] & (token < length)[None, :]
    tl.store(address, code.to(codes.dtype.element_ty), mask=valid)


def angular_hash(x: Tensor, rotations: Tensor, factors: list[int]) -> Tensor:
    """Compute `hashing.angular_hash` in one launch for all rows, rounds and factors."""
    x = whole_vectors(x)
    batch, heads, length, width = x.shape
    rounds = rotations.shape[1]
    columns = rotations.shape[3]
    codes = torch.empty(batch, heads, rounds, length, dtype=code_dtype(math.prod(factors)), device=x.device)
    sizes = _tile(max(factors) // 2, width)
    grid = (-(-length // sizes["TOKENS"]) * batch * heads * rounds,)
    launch(
        angular, grid, x=x, rotations=rotations.float().contiguous(), codes=codes, length=length, heads=heads,
        rounds=rounds, **strides(x=x), columns=columns, FACTORS=tuple(factors), D=width, **sizes,
    )  # fmt: skip
    return codes


def learned_codes(inputs: Sequence[Tensor], weights: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """Return the first maximum of Σ_f W2_f·relu(W1_f·x_f + b1_f) + b2_f over N buckets: (B, H, L).

    inputs: x_f (B, H, L, D). weights: of each function (H, D, D), (H·D), (H, D, N), (H·N), or only (H, D, N).
    """
    batch, heads, length, width = inputs[0].shape
    second = torch.cat([layer[-2:][0] for layer in weights], 1)
    biases = [layer[3].contiguous() for layer in weights if len(layer) > 1]
    if not biases:
        hidden = torch.cat([x.float() for x in inputs], -1)
    else:
        total = width * len(inputs)
        hidden = inputs[0].new_empty(batch, heads, length, total, dtype=torch.float32)
        sizes = _tile(width, width)
        grid = (-(-length // sizes["TOKENS"]) * batch * heads * -(-width // sizes["COLUMNS"]),)
        for number, (x, w) in enumerate(zip(map(whole_vectors, inputs), weights, strict=True)):
            launch(
                hidden_units, grid, x=x, weight=w[0].contiguous(), bias=w[1].contiguous(), out=hidden, length=length,
                heads=heads, **strides(x=x), width=total, first=number * width, D=width, **sizes,
            )  # fmt: skip
    codes = torch.empty(batch, heads, length, dtype=code_dtype(second.shape[2]), device=hidden.device)
    sizes = _tile(second.shape[2], hidden.shape[3])
    grid = (-(-length // sizes["TOKENS"]) * batch * heads,)
    launch(
        best_bucket, grid, x=hidden, weight=second, bias=torch.cat(biases) if biases else second, codes=codes,
        length=length, heads=heads, buckets=second.shape[2], D=hidden.shape[3], BIASES=len(biases), **sizes,
    )  # fmt: skip
    return codes


def sign_codes(x: Tensor, key: Key, heads: range, hashes: int, code_bits: int, kind: Kind) -> Tensor:
    """Compute `hashing.sign_codes` in one launch."""
    x = whole_vectors(x)
    batch, count, length, width = x.shape
    assert len(heads) == count
    planes = hash_planes(key, heads, hashes, code_bits, width, kind, x.device)
    codes = torch.empty(batch, len(heads), hashes, length, dtype=code_dtype(1 << code_bits), device=x.device)
    shared = {"x": x, "codes": codes, "length": length, "heads": count, "hashes": hashes, "bits": code_bits, "D": width}
    shared |= strides(x=x)
    if kind == "gaussian":
        planes = planes.permute(0, 2, 3, 1).contiguous()  # (H, τ, D, m)
        sizes = _tile(hashes, width)
        grid = (-(-length // sizes["TOKENS"]) * batch * len(heads) * -(-hashes // sizes["COLUMNS"]),)
        launch(sides, grid, **shared, normals=planes, **sizes)
        return codes
    power = 1 << (width - 1).bit_length()
    tokens = min(32 * _WARPS, _COORDINATES // power)
    hashes_per_part = min(power, 1 << (hashes - 1).bit_length(), _HASHES)
    parts = -(-hashes // hashes_per_part)
    grid = (-(-length // tokens) * batch * len(heads) * parts,)
    levels = power.bit_length() - 1
    launch(
        transformed_sides, grid, **shared, diagonals=planes, again=0, LEVELS=levels,
        PARTS_LEVELS=levels - (hashes_per_part.bit_length() - 1), FIRST=parts == 1, TOKENS=tokens, num_warps=_WARPS,
    )  # fmt: skip
    return codes


def _tile(columns: int, width: int) -> dict[str, int]:
    """Return tile sizes for vectors of `width` numbers times `columns` columns."""
    tokens, block_columns = (128, 16) if columns <= 16 else (64, 32)
    depth = block(width) if width <= 64 else 32  # elements of D at a time; more would spill
    return {"TOKENS": tokens, "COLUMNS": block_columns, "DEPTH": depth, "num_warps": _WARPS}
