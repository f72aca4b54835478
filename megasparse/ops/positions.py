"""Functions of positions: sinusoids and rotations of pairs."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megasparse.ops.operator import at_least_fp32

_CACHED_NUMBERS = 1 << 24  # largest cached table: 64 MB


def sinusoids(first: int, count: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """Return sinusoidal embeddings (count, width) fp32 of the positions [first, first + count) (Vaswani et al. 2017).

    Computed in float64, so that devices agree up to the last bit. Do not modify the result: small tables are cached.
    """
    device = torch.device(device)
    cached = count > 1 and count * width <= _CACHED_NUMBERS and device.type != "meta"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        cached = False  # the graph would read a table that the cache may free
    return (cached_sinusoids if cached else cached_sinusoids.__wrapped__)(first, count, width, device)


@lru_cache(maxsize=4)
@torch.inference_mode(False)  # inference tensors cannot be used in training
def cached_sinusoids(first: int, count: int, width: int, device: torch.device) -> Tensor:
    half = (width + 1) // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angle = torch.arange(first, first + count, dtype=torch.float64, device=device)[:, None] * frequency
    return torch.cat([torch.sin(angle).float(), torch.cos(angle).float()], dim=-1)[:, :width]


def rotate(x: Tensor, first_position: int | Tensor, frequency: Tensor, scale: float = 1.0) -> Tensor:
    """Apply rotary positions (Su et al., RoFormer): rotate the pair (x_i, x_{i+D/2}) by position·frequency_i, times
    `scale`. x: (B, H, L, D). first_position: or (B or 1, 1, L), added to each index. frequency: (D/2,) float64.
    """
    half = x.shape[-1] // 2
    position = torch.arange(x.shape[2], dtype=torch.float64, device=x.device) + first_position
    angle = position[..., None] * frequency  # (L, D/2), or (B or 1, 1, L, D/2)
    wide = at_least_fp32(x)
    wide = wide if scale == 1.0 else wide * scale
    cosine = torch.cos(angle).to(wide.dtype)
    sine = torch.sin(angle).to(wide.dtype)
    first = wide[..., :half]
    second = wide[..., half:]
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x.dtype)


LLAMA3_TURNS = (1.0, 4.0)
"""Llama 3 divides frequencies with fewer turns in original_length than the first, keeps those above the second."""
YARN_TURNS = (32.0, 1.0)
"""The paper's alpha and beta, in turns: YaRN keeps a frequency above the first and divides it below the second."""


@dataclass(frozen=True)
class Rotary:
    """Rotation of queries and keys with f_i = base^(−2i/D), modified by the scaling of this kind:

    linear: f_i/factor (Chen et al. 2023). ntk: base becomes base·factor^(D/(D−2)). llama3: f_i for wavelengths up to
    original_length/4, f_i/factor from original_length on, interpolated by the turns in between. yarn (Peng et al.
    2023): the same between 32 turns and 1 turn, interpolated by i; queries and keys are multiplied by attention_factor.
    """

    head_dim: int
    base: float
    kind: str | None = None
    factor: float = 1.0
    original_length: int | None = None
    attention_factor: float | None = None

    @property
    def scale(self) -> float:
        """Factor of queries and keys."""
        if self.kind != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(self.factor) + 1.0

    def __call__(self, x: Tensor, first_position: int | Tensor) -> Tensor:
        """Rotate x (B, H, L, D), whose tokens are at positions from `first_position` on, see `rotate`."""
        return rotate(x, first_position, self.frequencies(x.device), self.scale)

    def frequencies(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the rotation angle of each pair per position, (D/2,) float64."""
        base = self.base
        half = self.head_dim // 2
        if self.kind == "ntk":
            base *= self.factor ** (half / (half - 1))
        number = torch.arange(half, dtype=torch.float64, device=device)
        frequency = base ** (-number / half)
        if self.kind is None or self.kind == "ntk":
            return frequency
        if self.kind == "linear":
            return frequency / self.factor
        length = self.original_length
        assert length is not None
        if self.kind == "yarn":
            # Index of the pair that makes this many turns in the original length.
            first, last = (half * math.log(length / (turns * 2 * math.pi)) / math.log(base) for turns in YARN_TURNS)
            first = max(math.floor(first), 0)
            last = min(math.ceil(last), 2 * half - 1)
            kept = 1 - ((number - first) / max(last - first, 0.001)).clamp(0, 1)
        else:
            low, high = LLAMA3_TURNS
            kept = ((length * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / self.factor)
