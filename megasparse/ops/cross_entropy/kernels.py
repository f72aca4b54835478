"""Device code of the scores of tokens: one program reads a token's logits once, V of them, BLOCK at a time."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e38)  # a running maximum that is finite, so that differences of two are no NaN


@triton.jit
def scores_forward(
    logits, targets, lse, scores, stride, width, smoothing, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute scores (N, COLUMNS), and lse (N,), the logarithm of the sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    highest, total, sums = tl.full((), LOWEST, tl.float32), tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
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
    chosen, rest = tl.load(logits + target).to(tl.float32), tl.log(total)
    nats = (highest - chosen) + rest
    scores += row * COLUMNS
    tl.store(lse + row, highest + rest)
    tl.store(scores, nats)
    tl.store(scores + 1, tl.where(target == likeliest, 1.0, 0.0))
    if COLUMNS == 3:
        tl.store(scores + 2, nats + smoothing * (chosen - sums / width))


@triton.jit
def scores_backward(
    logits, targets, lse, grad, slopes, stride, width, smoothing, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute slopes (N, V), the logits' gradient. grad: (N, COLUMNS). Program 1 has a block of the vocabulary."""
    row, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, mask=ids < width, other=0.0).to(tl.float32)
    every = tl.load(grad + row * COLUMNS)
    own, each = every, 0.0
    if COLUMNS == 3:
        smooth = tl.load(grad + row * COLUMNS + 2)
        every += smooth
        own += smooth * (1.0 - smoothing)
        each = smooth * smoothing / width
    slope = every * tl.exp2((x - tl.load(lse + row)) * LOG2E) - tl.where(ids == tl.load(targets + row), own, 0.0) - each
    tl.store(slopes + row * width + ids, slope.to(slopes.dtype.element_ty), mask=ids < width)
