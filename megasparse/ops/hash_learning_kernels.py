"""Kernels of `hash_learning` on whole rows of scores of all N buckets, which are read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megasparse.ops.kernels import launch

_NUMBERS = 8192  # per program


def unit_sum(utility: Tensor) -> Tensor:
    """Compute `hash_learning.unit_sum` in place."""
    utility = utility.contiguous()
    count = utility[..., 0].numel()
    tile = _tile(utility)
    grid = (-(-count // tile["ROWS"]),)
    launch(unit_sum_kernel, grid, utility=utility, count=count, buckets=utility.shape[-1], **tile)
    return utility


def ranks(scores: Tensor, first: int) -> Tensor:
    """Compute `hash_learning.ranks`."""
    scores = scores.contiguous()
    batch, heads, tokens, buckets = scores.shape
    out = scores.new_empty(batch, heads, buckets, tokens, dtype=torch.int64)
    tile = _tile(scores)
    blocks = -(-tokens // tile["ROWS"])
    launch(
        ranks_kernel, (batch * heads * blocks,), scores=scores, out=out, first=first, tokens=tokens, buckets=buckets,
        blocks=blocks, **tile,
    )  # fmt: skip
    return out


def divergence(
    scores: Tensor, utility: Tensor, codes: Tensor, weight: float, learn: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute `hash_learning.divergence`; the gradient overwrites the scores."""
    scores = scores.contiguous()
    count = codes.numel()
    tile = _tile(scores)
    sums = scores.new_empty(count, 3, dtype=torch.float32)
    launch(
        divergence_kernel, (-(-count // tile["ROWS"]),), scores=scores, utility=utility.contiguous(),
        codes=codes.contiguous(), sums=sums, weight=weight, count=count, buckets=scores.shape[-1], LEARN=learn, **tile,
    )  # fmt: skip
    return sums.sum(0, dtype=torch.float64), scores if learn else None


def _tile(x: Tensor) -> dict[str, int]:
    wide = triton.next_power_of_2(x.shape[-1])
    return {"ROWS": max(1, min(16, _NUMBERS // wide)), "WIDTH": wide, "num_warps": 8}


@triton.jit
def _places(count, buckets, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return a program's rows, the offsets of their numbers, and a mask of valid offsets."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    bucket = tl.arange(0, WIDTH)
    return row, row[:, None] * buckets + bucket[None, :], (row < count)[:, None] & (bucket < buckets)[None, :]


@triton.jit
def _log_softmax(scores, places, valid):
    """Return ln softmax of rows of scores, −∞ for invalid elements."""
    score = tl.load(scores + places, mask=valid, other=float("-inf"))
    score = tl.where(valid, score, float("-inf"))
    high = tl.max(score, 1)
    high = tl.where(high == float("-inf"), 0.0, high)[:, None]
    return score - high - tl.log(tl.sum(tl.exp(score - high), 1))[:, None]


@triton.jit(do_not_specialize=["count"])
def unit_sum_kernel(utility, count, buckets, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    _, places, valid = _places(count, buckets, ROWS, WIDTH)
    value = tl.load(utility + places, mask=valid, other=0.0)
    total = tl.sum(value, 1)[:, None]
    tl.store(utility + places, tl.where(total > 0, value / tl.where(total > 0, total, 1.0), 0.0), mask=valid)


@triton.jit(do_not_specialize=["first", "blocks"])
def ranks_kernel(scores, out, first, tokens, buckets, blocks, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Compute out (B·H, N, T): the bits of −ln softmax(scores), with the token's number in the low bits."""
    head = (tl.program_id(0) // blocks).to(tl.int64)
    token = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    bucket = tl.arange(0, WIDTH)
    valid = (token < tokens)[:, None] & (bucket < buckets)[None, :]
    places = (head * tokens + token)[:, None] * buckets + bucket[None, :]
    penalty = tl.abs(_log_softmax(scores, places, valid))
    rank = (penalty.to(tl.int32, bitcast=True).to(tl.int64) << 32) + (first + token)[:, None]
    tl.store(out + (head * buckets + bucket)[None, :] * tokens + token[:, None], rank, mask=valid)


@triton.jit(do_not_specialize=["weight", "count"])
def divergence_kernel(
    scores, utility, codes, sums, weight, count, buckets, LEARN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Compute sums (rows, 3), times weight: KL(ψ ‖ softmax(scores)), ψ[code] and Σ ψ·ln ψ. LEARN: overwrite the scores
    with the gradient.
    """
    row, places, valid = _places(count, buckets, ROWS, WIDTH)
    logarithm = _log_softmax(scores, places, valid)
    utilities = tl.load(utility + places, mask=valid, other=0.0)
    positive = utilities > 0
    information = utilities * tl.log(tl.where(positive, utilities, 1.0))
    terms = information - tl.where(positive, utilities * logarithm, 0.0)
    code = tl.load(codes + row, mask=row < count, other=0)
    chosen = tl.sum(tl.where(tl.arange(0, WIDTH)[None, :] == code[:, None], utilities, 0.0), 1)
    tl.store(sums + 3 * row, weight * tl.sum(terms, 1), mask=row < count)
    tl.store(sums + 3 * row + 1, weight * chosen, mask=row < count)
    tl.store(sums + 3 * row + 2, weight * tl.sum(information, 1), mask=row < count)
    if LEARN:
        error = weight * (tl.exp(logarithm) * tl.sum(utilities, 1)[:, None] - utilities)
        tl.store(scores + places, error, mask=valid)
