"""Rows of scores of all buckets, in torch. B batch, H heads, T tokens, N buckets."""

import torch
from torch import Tensor


def unit_sum(utility: Tensor) -> Tensor:
    """Computes `operator.unit_sum`."""
    total = utility.sum(-1, keepdim=True)
    return torch.where(total > 0, utility / total, 0.0)


def ranks(scores: Tensor, first: int) -> Tensor:
    """Computes `operator.ranks`."""
    # Bits of a positive number are ordered as the number is. With the token's number below them no two are equal.
    penalty = -scores.log_softmax(-1).float().transpose(-1, -2)  # (B, H, N, T)
    rank = penalty.abs().contiguous().view(torch.int32).long() << 32
    return rank + torch.arange(first, first + scores.shape[2], device=rank.device)


def divergence(
    scores: Tensor, utility: Tensor, codes: Tensor, weight: float, learn: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Computes `operator.divergence`."""
    logarithm = scores.log_softmax(-1)
    information = torch.xlogy(utility, utility)
    total = weight * (information - utility * logarithm).sum()
    kept = weight * utility.gather(-1, codes.long().unsqueeze(-1)).sum()
    error = weight * (logarithm.exp_() * utility.sum(-1, keepdim=True) - utility) if learn else None
    return total, kept, weight * information.sum(), error
