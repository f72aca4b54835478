"""Functions of positions: sinusoids and rotations of pairs. B batch, L length, H heads, D head dim."""

from functools import lru_cache

import torch
from torch import Tensor

from megasparse.ops.operator import at_least_fp32

_CACHED_NUMBERS = 1 << 24  # largest cached table: 64 MB


def sinusoids(first: int, count: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """Return sinusoidal embeddings (count, width) fp32 of the positions [first, first + count) (Vaswani et al. 2017).

    Computed in float64 on the device, so that devices agree up to the last bit of fp32. Do not modify the result in
    place, because small tables are cached.
    """
    device = torch.device(device)
    cached = count > 1 and count * width <= _CACHED_NUMBERS and device.type != "meta"
    return (cached_sinusoids if cached else _sinusoids)(first, count, width, device)


def _sinusoids(first: int, count: int, width: int, device: torch.device) -> Tensor:
    half = (width + 1) // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angle = torch.arange(first, first + count, dtype=torch.float64, device=device)[:, None] * frequency
    return torch.cat([torch.sin(angle).float(), torch.cos(angle).float()], dim=-1)[:, :width]


@lru_cache(maxsize=4)
def cached_sinusoids(first: int, count: int, width: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # inference tensors cannot be used in training
        return _sinusoids(first, count, width, device)


def rotate(x: Tensor, first_position: int, frequency: Tensor, scale: float = 1.0) -> Tensor:
    """Apply rotary positions (Su et al., RoFormer): rotate the pair (x_i, x_{i+D/2}) by position·frequency_i, times
    `scale`. x: (B, H, L, D). frequency: (D/2,) float64.
    """
    half = x.shape[-1] // 2
    position = torch.arange(first_position, first_position + x.shape[2], dtype=torch.float64, device=x.device)
    angle = position[:, None] * frequency  # (L, D/2)
    wide = at_least_fp32(x)
    wide = wide if scale == 1.0 else wide * scale
    cosine, sine = torch.cos(angle).to(wide.dtype), torch.sin(angle).to(wide.dtype)
    first, second = wide[..., :half], wide[..., half:]
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x.dtype)
