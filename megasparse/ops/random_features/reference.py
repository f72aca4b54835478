"""The definition of positive random features, to test against. B batch, H heads, L length, D head dim, F features."""

import math

import torch
from torch import Tensor


def positive_features(x: Tensor, projection: Tensor) -> Tensor:
    """Compute φ(x) = exp(−|x|²/2)/√F · exp(ωx), (B, H, L, F), unstabilised (Choromanski et al. 2020, Lemma 1)."""
    products = torch.einsum("bhld,hfd->bhlf", x, projection.to(x.dtype))
    return torch.exp(-(x**2).sum(-1, keepdim=True) / 2) / math.sqrt(projection.shape[1]) * torch.exp(products)
