"""Scores of tokens as Triton kernels: one program reads a token's logits once, BLOCK at a time. N tokens, V ids."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megasparse.ops.kernels import launch, whole_vectors
from megasparse.ops.operator import Function

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e38)  # initial maximum, finite so that differences are not NaN
IGNORED = tl.constexpr(-100)
"""Target of tokens that are not scored."""


@triton.jit
def scores_forward(
    logits, targets, lse, scores, stride, width, smoothing, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute scores (N, COLUMNS), and lse (N,). A target outside the vocabulary other than `IGNORED` makes lse NaN,
    and with it the token's scores and gradient: a kernel cannot raise an error, and must not read beyond the logits.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    highest = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    sums = tl.full((), 0.0, tl.float32)
    likeliest = tl.full((), 0, tl.int32)
    for start in range(0, width, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < width, other=-float("inf")).to(tl.float32)
        top = tl.max(x, 0)
        likeliest = tl.where(top > highest, tl.min(tl.where(x == top, ids, width), 0), likeliest)
        higher = tl.maximum(highest, top)
        total = total * tl.exp2((highest - higher) * LOG2E) + tl.sum(tl.exp2((x - higher) * LOG2E), 0)
        if COLUMNS == 3:
            sums += tl.sum(tl.where(ids < width, x, 0.0), 0)
        highest = higher
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < width)
    chosen = tl.load(logits + target, mask=inside, other=0.0).to(tl.float32)
    rest = tl.where(inside | (target == IGNORED), tl.log(total), float("nan"))
    nats = tl.where(target == IGNORED, 0.0, (highest - chosen) + rest)
    scores += row * COLUMNS
    tl.store(lse + row, highest + rest)
    tl.store(scores, nats)
    tl.store(scores + 1, tl.where(target == likeliest, 1.0, 0.0))
    if COLUMNS == 3:
        tl.store(scores + 2, tl.where(target == IGNORED, 0.0, nats + smoothing * (chosen - sums / width)))


@triton.jit
def scores_backward(
    logits, targets, lse, grad, slopes, stride, width, smoothing, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute slopes (N, V), the gradient of the logits. grad: (N, COLUMNS). Grid axis 1: blocks of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, mask=ids < width, other=0.0).to(tl.float32)
    total = tl.load(grad + row * COLUMNS)
    of_target = total
    of_all = 0.0
    if COLUMNS == 3:
        smooth = tl.load(grad + row * COLUMNS + 2)
        total += smooth
        of_target += smooth * (1.0 - smoothing)
        of_all = smooth * smoothing / width
    target = tl.load(targets + row)
    slope = total * tl.exp2((x - tl.load(lse + row)) * LOG2E) - tl.where(ids == target, of_target, 0.0) - of_all
    slope = tl.where(target == IGNORED, 0.0, slope)
    tl.store(slopes + row * width + ids, slope.to(slopes.dtype.element_ty), mask=ids < width)


_BLOCK = 4096  # logits per program at a time
_PER_WARP = 512


def token_scores(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Compute `cross_entropy.token_scores` in fp32, bf16 or fp16. A target outside the vocabulary gives NaN."""
    return _TokenScores.apply(logits, targets, smoothing)


class _TokenScores(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        logits = whole_vectors(logits)
        targets = targets.contiguous()
        count, width = logits.shape
        size = min(_BLOCK, triton.next_power_of_2(width))
        ctx.shared = {"stride": logits.stride(0), "width": width, "smoothing": smoothing, "BLOCK": size}
        ctx.shared |= {"COLUMNS": 3 if smoothing else 2, "num_warps": max(1, size // _PER_WARP)}
        lse = logits.new_empty(count, dtype=torch.float32)
        scores = lse.new_empty(count, ctx.shared["COLUMNS"])
        launch(scores_forward, (count,), logits=logits, targets=targets, lse=lse, scores=scores, **ctx.shared)
        ctx.save_for_backward(logits, targets, lse)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lse = ctx.saved_tensors
        count, width = logits.shape
        slopes = logits.new_empty(count, width)
        launch(
            scores_backward, (count, triton.cdiv(width, ctx.shared["BLOCK"])), logits=logits, targets=targets, lse=lse,
            grad=grad.contiguous(), slopes=slopes, **ctx.shared,
        )  # fmt: skip
        return slopes, None, None
