"""Rows of scores of all buckets, in a few passes over them on a GPU. B batch, H heads, T tokens, N buckets."""

from types import ModuleType

import torch
from torch import Tensor

from megasparse.ops.backend import implementation
from megasparse.ops.hash_learning import blockwise

_WIDEST = 8192
"""Buckets whose scores one program holds."""


@torch.no_grad()
def unit_sum(utility: Tensor) -> Tensor:
    """Divide rows of utility (B, H, T, N), which is not needed any more, by their sums; a row of sum 0 gives 0."""
    found: Tensor = _module(utility).unit_sum(utility)
    return found


@torch.no_grad()
def ranks(scores: Tensor, first: int) -> Tensor:
    """Ranks of tokens in every bucket: (B, H, N, T) int64, the smallest for the largest softmax(scores) over a token's
    buckets, of equals for the earlier token; the low 32 bits are the token's number.

    scores: (B, H, T, N) of the tokens from number `first` on.
    """
    found: Tensor = _module(scores).ranks(scores, first)
    return found


@torch.no_grad()
def divergence(
    scores: Tensor, utility: Tensor, codes: Tensor, weight: float, learn: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute weight·Σ KL(ψ ‖ softmax(scores)) (LHA Eq. 13), weight·Σ ψ[code], weight·Σ ψ·ln ψ, and where `learn` the
    gradient of the first by the scores, weight·(softmax(scores)·Σψ − ψ), else None.

    scores, utility ψ: (B, H, T, N); scores are not needed any more. codes: (B, H, T), a bucket of every token. A token
    whose ψ is 0 adds nothing.
    """
    total, kept, information, error = _module(scores).divergence(scores, utility, codes, weight, learn)
    return total, kept, information, error


def _module(x: Tensor) -> ModuleType:
    if implementation(x, dtypes=(torch.float32,), largest_width=_WIDEST) == "triton":
        from megasparse.ops.hash_learning import gpu

        return gpu
    return blockwise
