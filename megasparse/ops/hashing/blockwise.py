"""Angular LSH in blocks of positions, so that rotated vectors never exist for the whole sequence at once."""

import math

import torch
from torch import Tensor

from megasparse.ops.autocast import without_autocast
from megasparse.ops.hashing.sign import Kind, code_dtype, drawn, drawn_codes

_BLOCK_ELEMENTS = 1 << 21  # rotated numbers at a time: 8 MB of fp32


@without_autocast
@torch.no_grad()
def angular_hash(x: Tensor, rotations: Tensor, factors: list[int]) -> Tensor:
    """Computes `operator.angular_hash` in blocks."""
    batch, heads, length, head_dim = x.shape
    rounds, width = rotations.shape[1], rotations.shape[3]
    dtype = torch.promote_types(x.dtype, torch.float32)
    matrix = rotations.to(dtype).permute(0, 2, 1, 3).reshape(heads, head_dim, rounds * width)
    codes = torch.empty(batch, heads, rounds, length, dtype=code_dtype(math.prod(factors)), device=x.device)
    step = max(1, _BLOCK_ELEMENTS // (batch * heads * rounds * width))
    for start in range(0, length, step):
        rotated = x[:, :, start : start + step].to(dtype) @ matrix  # (B, H, l, R·S)
        rotated = rotated.unflatten(-1, (rounds, width))
        code: Tensor | int = 0
        for part, factor in zip(rotated.split([n // 2 for n in factors], dim=-1), factors, strict=True):
            highest, lowest = part.max(dim=-1), part.min(dim=-1)
            plus = highest.values >= -lowest.values
            code = code * factor + torch.where(plus, highest.indices, lowest.indices + factor // 2)
        codes[..., start : start + step] = code.transpose(-1, -2)  # type: ignore[union-attr]
    return codes


def sign_codes(x: Tensor, key: int, heads: range, hashes: int, code_bits: int, kind: Kind) -> Tensor:
    """Computes `operator.sign_codes` in blocks."""
    return drawn_codes(x, drawn(key, heads, hashes, code_bits, x.shape[3], kind, x.device), hashes, kind)
