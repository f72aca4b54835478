"""Rows of scores of all buckets, a launch for each function: scores and utilities are read once, results written once.

B batch, H heads, T tokens, N buckets.
"""

import torch
import triton
from torch import Tensor

from megasparse.ops.hash_learning import kernels
from megasparse.ops.kernels import launch

_NUMBERS = 8192  # of a program


def unit_sum(utility: Tensor) -> Tensor:
    """Computes `operator.unit_sum`, in place."""
    utility = utility.contiguous()
    tile, count, buckets = _tile(utility), utility[..., 0].numel(), utility.shape[-1]
    launch(kernels.unit_sum, (-(-count // tile["ROWS"]),), utility, count, buckets, **tile)
    return utility


def ranks(scores: Tensor, first: int) -> Tensor:
    """Computes `operator.ranks`."""
    scores = scores.contiguous()
    batch, heads, tokens, buckets = scores.shape
    out = torch.empty(batch, heads, buckets, tokens, dtype=torch.int64, device=scores.device)
    tile = _tile(scores)
    blocks = -(-tokens // tile["ROWS"])
    launch(kernels.ranks, (batch * heads * blocks,), scores, out, first, tokens, buckets, blocks, **tile)
    return out


def divergence(
    scores: Tensor, utility: Tensor, codes: Tensor, weight: float, learn: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Computes `operator.divergence`; the gradient takes the place of the scores."""
    scores, utility, codes = scores.contiguous(), utility.contiguous(), codes.contiguous()
    tile, count, buckets = _tile(scores), codes.numel(), scores.shape[-1]
    sums = torch.empty(count, 3, dtype=torch.float32, device=scores.device)
    grid = (-(-count // tile["ROWS"]),)
    launch(kernels.divergence, grid, scores, utility, codes, sums, weight, count, buckets, LEARN=learn, **tile)
    total, kept, information = sums.sum(0, dtype=torch.float64) * weight
    return total, kept, information, scores if learn else None


def _tile(x: Tensor) -> dict[str, int]:
    wide = triton.next_power_of_2(x.shape[-1])
    return {"ROWS": max(1, min(16, _NUMBERS // wide)), "WIDTH": wide, "num_warps": 8}
