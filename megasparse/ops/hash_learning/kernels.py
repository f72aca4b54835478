"""Rows of N scores or utilities on the device; a program holds whole rows."""

import triton
import triton.language as tl


@triton.jit
def _places(count, buckets, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A program's rows, where their numbers are, and which there are."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    bucket = tl.arange(0, WIDTH)
    return row, row[:, None] * buckets + bucket[None, :], (row < count)[:, None] & (bucket < buckets)[None, :]


@triton.jit
def _log_softmax(scores, places, valid):
    """ln softmax of rows of scores, −∞ where not valid."""
    score = tl.load(scores + places, mask=valid, other=float("-inf"))
    score = tl.where(valid, score, float("-inf"))
    high = tl.max(score, 1)
    high = tl.where(high == float("-inf"), 0.0, high)[:, None]
    return score - high - tl.log(tl.sum(tl.exp(score - high), 1))[:, None]


@triton.jit
def unit_sum(utility, count, buckets, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    _, places, valid = _places(count, buckets, ROWS, WIDTH)
    value = tl.load(utility + places, mask=valid, other=0.0)
    total = tl.sum(value, 1)[:, None]
    tl.store(utility + places, tl.where(total > 0, value / tl.where(total > 0, total, 1.0), 0.0), mask=valid)


@triton.jit(do_not_specialize=["first"])
def ranks(scores, out, first, tokens, buckets, blocks, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """out (B·H, N, T): the bits of −ln softmax(scores), and the token's number below them."""
    head = (tl.program_id(0) // blocks).to(tl.int64)
    token, bucket = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    valid = (token < tokens)[:, None] & (bucket < buckets)[None, :]
    places = (head * tokens + token)[:, None] * buckets + bucket[None, :]
    penalty = tl.abs(_log_softmax(scores, places, valid))
    rank = (penalty.to(tl.int32, bitcast=True).to(tl.int64) << 32) + (first + token)[:, None]
    tl.store(out + (head * buckets + bucket)[None, :] * tokens + token[:, None], rank, mask=valid)


@triton.jit(do_not_specialize=["weight"])
def divergence(
    scores, utility, codes, sums, weight, count, buckets, LEARN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """sums (rows, 3): KL(ψ ‖ softmax(scores)), ψ[code] and Σ ψ·ln ψ. LEARN: the gradient of weight·KL takes the place
    of the scores.
    """
    row, places, valid = _places(count, buckets, ROWS, WIDTH)
    logarithm = _log_softmax(scores, places, valid)
    wanted = tl.load(utility + places, mask=valid, other=0.0)
    known = wanted > 0
    information = wanted * tl.log(tl.where(known, wanted, 1.0))
    each = information - tl.where(known, wanted * logarithm, 0.0)
    code = tl.load(codes + row, mask=row < count, other=0)
    kept = tl.sum(tl.where(tl.arange(0, WIDTH)[None, :] == code[:, None], wanted, 0.0), 1)
    tl.store(sums + 3 * row, tl.sum(each, 1), mask=row < count)
    tl.store(sums + 3 * row + 1, kept, mask=row < count)
    tl.store(sums + 3 * row + 2, tl.sum(information, 1), mask=row < count)
    if LEARN:
        error = weight * (tl.exp(logarithm) * tl.sum(wanted, 1)[:, None] - wanted)
        tl.store(scores + places, error, mask=valid)
