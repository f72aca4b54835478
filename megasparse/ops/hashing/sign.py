"""Sign codes: a vector's τ bits in each of m hashes are its sides of random hyperplanes (YOSO Eq. 20 and 21).

B batch, H heads, L length, D head dim, P the next power of two, m hashes, τ code bits.
"""

from typing import Literal

import torch
from torch import Tensor

from megasparse.ops.autocast import without_autocast
from megasparse.ops.random import bits_by_head, normal_by_head

_BLOCK_ELEMENTS = 1 << 20  # projected numbers at a time: 4 MB of fp32
MOST_BITS = 30  # codes are int32 at most
Kind = Literal["hadamard", "gaussian"]


def code_dtype(count: int) -> torch.dtype:
    """The smallest integer type that holds codes below `count`."""
    return torch.int16 if count <= 1 << 15 else torch.int32


def drawn(key: int, heads: range, hashes: int, code_bits: int, width: int, kind: Kind, device: torch.device) -> Tensor:
    """What hashes are drawn from: gaussian hyperplanes, (H, m, τ, D) fp32; or D₁, D₂, D₃ of every transform, (H, groups
    of P hashes, τ, 3, P) int32: −1 where negative, else 1.
    """
    if kind == "gaussian":
        normals = normal_by_head(key, heads, hashes, code_bits * width, device)
        return normals.view(len(heads), hashes, code_bits, width)
    power = 1 << (width - 1).bit_length()
    groups = -(-hashes // power)
    bits = bits_by_head(key, heads, groups * code_bits, 3 * power, device)
    return bits.view(len(heads), groups, code_bits, 3, power)


@without_autocast
@torch.no_grad()
def drawn_codes(x: Tensor, drawn: Tensor, hashes: int, kind: Kind) -> Tensor:
    """Computes `operator.sign_codes` in blocks, from what was `drawn`."""
    batch, heads, length, _ = x.shape
    dtype, (groups, code_bits) = torch.promote_types(x.dtype, torch.float32), drawn.shape[1:3]
    drawn = drawn.flatten(1, 2)  # (H, m·τ, D) or (H, groups·τ, 3, P)
    drawn = drawn.to(dtype) if kind == "gaussian" else torch.where(drawn < 0, -1.0, 1.0).to(dtype)
    numbers = drawn.shape[1] * (1 if kind == "gaussian" else drawn.shape[3])
    codes = torch.empty(batch, heads, hashes, length, dtype=code_dtype(1 << code_bits), device=x.device)
    step = max(1, _BLOCK_ELEMENTS // (batch * heads * numbers))
    for start in range(0, length, step):
        block = x[:, :, start : start + step].to(dtype)
        if kind == "gaussian":
            side = (block @ drawn.transpose(1, 2)).unflatten(-1, (hashes, code_bits)) >= 0
        else:
            side = _transformed(block, drawn).unflatten(-2, (groups, code_bits)) >= 0  # (B, H, l, groups, τ, P)
            side = side.transpose(-1, -2).flatten(-3, -2)[..., :hashes, :]
        code = sum(side[..., bit].to(codes.dtype) << bit for bit in range(code_bits))  # (B, H, l, m)
        codes[..., start : start + step] = code.transpose(-1, -2)  # type: ignore[union-attr]
    return codes


def _transformed(x: Tensor, diagonals: Tensor) -> Tensor:
    """HD₃HD₂HD₁x of every transform: x (B, H, l, D), diagonals (H, T, 3, P); (B, H, l, T, P), not normalised."""
    power = diagonals.shape[-1]
    x = torch.nn.functional.pad(x, (0, power - x.shape[-1]))[..., None, :]  # (B, H, l, 1, P)
    for diagonal in diagonals.unbind(2):
        x = hadamard(x * diagonal[:, None])
    return x


def hadamard(x: Tensor) -> Tensor:
    """Hx over the last dimension, a power of two, without the factor P^−1/2; log₂ P rounds of sums and differences."""
    half = 1
    while half < x.shape[-1]:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        half *= 2
    return x
