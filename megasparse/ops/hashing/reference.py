"""The definition of angular LSH, to test against. B batch, H heads, L length, D head dim, R rounds."""

import torch
from torch import Tensor


def angular_hash(x: Tensor, rotations: Tensor, factors: list[int]) -> Tensor:
    """h(x) = argmax([xR; −xR]) (Reformer section 2), mixed-radix over the factors: h = h_1·n_2 + h_2.

    x: (B, H, L, D). rotations: (H, R, D, Σ n_f/2), the factors' matrices side by side. Returns (B, H, R, L) int64.
    Computed in float64.
    """
    rotated = torch.einsum("bhld,hrds->bhrls", x.double(), rotations.double())
    code = torch.zeros(rotated.shape[:-1], dtype=torch.int64, device=x.device)
    for part, factor in zip(rotated.split([n // 2 for n in factors], dim=-1), factors, strict=True):
        code = code * factor + torch.cat([part, -part], dim=-1).argmax(dim=-1)
    return code
