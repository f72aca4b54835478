"""Positions as functions of their number: sinusoids, and rotations of pairs. B batch, L length, H heads, D head dim."""

import torch
from torch import Tensor


def sinusoids(first: int, count: int, width: int) -> Tensor:
    """Sinusoidal embeddings (count, width) fp32 of the positions [first, first + count) (Vaswani et al. 2017)."""
    half = (width + 1) // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(first, first + count, dtype=torch.float64)[:, None] * frequency
    return torch.cat([torch.sin(angle).float(), torch.cos(angle).float()], dim=-1)[:, :width]


def rotate(x: Tensor, first_position: int) -> Tensor:
    """Rotary positions (Su et al., RoFormer): the pair (x_i, x_{i+D/2}) turned by position·10000^(−2i/D). x: (B, H,
    L, D).
    """
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    position = torch.arange(first_position, first_position + x.shape[2], dtype=torch.float64, device=x.device)
    angle = position[:, None] * frequency  # (L, D/2)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    cosine, sine = torch.cos(angle).to(wide.dtype), torch.sin(angle).to(wide.dtype)
    first, second = wide[..., :half], wide[..., half:]
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x.dtype)
