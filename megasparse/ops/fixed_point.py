"""Numbers of a fixed step inside a floating-point format: their sums are exact, so a sum can be undone to the bit."""

import torch
from torch import Tensor

MANTISSA = {torch.float32: 23, torch.float64: 52}
"""Bits of the significand that a format stores."""


def to_fixed_point(x: Tensor, bits: int) -> Tensor:
    """Round x, fp32 or fp64, to the nearest multiple of 2^−bits; the gradient is that of x itself.

    Exact below 2^(22 − bits) in fp32 (2^(51 − bits) in fp64): multiples of 2^−bits of that size, and their sums and
    differences, are numbers of the format. Above it the step grows, and sums round as ever. x + c lies where the
    format's own step is 2^−bits, so adding c rounds, and taking it off is exact.
    """
    c = 1.5 * 2.0 ** (MANTISSA[x.dtype] - bits)
    return (x + c) - c
