"""Hash functions of attention, from vectors to bucket codes: angular LSH (Reformer) and sign codes (YOSO), in blocks of
positions. m hashes, τ code bits, P the next power of two of D.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.ops.operator import at_least_rows, operator, wide_dtype
from megasparse.ops.random import Key, bits_by_head, normal_by_head

_BLOCK_ELEMENTS = 1 << 21  # rotated numbers per block: 8 MB of fp32
_SIGN_ELEMENTS = 1 << 20  # projected numbers per block: 4 MB of fp32
MOST_BITS = 30  # codes are int32 at most
Kind = Literal["hadamard", "gaussian"]


def code_dtype(count: int) -> torch.dtype:
    """Return the smallest integer type for codes below `count`."""
    return torch.int16 if count <= 1 << 15 else torch.int32


@operator(differentiable=False)
def angular_hash(x: Tensor, rotations: Tensor, factors: list[int]) -> Tensor:
    """Compute h(x) = argmax([xR; −xR]) (Reformer section 2), mixed-radix over the factors: h = h_1·n_2 + h_2.

    Implementations differ only if the two largest scores are equal up to rounding. On a CPU the code of a vector does
    not depend on the number of vectors.

    Args:
        x: (B, H, L, D).
        rotations: (H, R, D, Σ n_f/2), the concatenated matrices of the factors n_f.

    Returns:
        Codes (B, H, R, L), int16 if large enough, else int32; not differentiable.
    """
    of_blocks = []
    for rotated in _rotated(x, rotations):
        code: Any = 0
        for part, factor in zip(rotated.split([n // 2 for n in factors], dim=-1), factors, strict=True):
            highest = part.max(dim=-1)
            lowest = part.min(dim=-1)
            plus = highest.values >= -lowest.values
            code = code * factor + torch.where(plus, highest.indices, lowest.indices + factor // 2)
        of_blocks.append(
            code.transpose(-1, -2).to(code_dtype(math.prod(factors)), memory_format=torch.contiguous_format)
        )
    return of_blocks[0] if len(of_blocks) == 1 else torch.cat(of_blocks, dim=-1)


def _rotated(x: Tensor, rotations: Tensor) -> Iterator[Tensor]:
    """Yield xR in blocks of positions, (B, H, l, R, S), in fp32 or wider."""
    batch, heads, _, head_dim = x.shape
    rounds = rotations.shape[1]
    width = rotations.shape[3]
    dtype = wide_dtype(x)
    matrix = rotations.to(dtype).permute(0, 2, 1, 3).reshape(heads, head_dim, rounds * width)  # (H, D, R·S)
    for block in x.split(max(1, _BLOCK_ELEMENTS // (batch * heads * rounds * width)), dim=2):
        rotated = (at_least_rows(block.to(dtype)) @ matrix)[:, :, : block.shape[2]]  # (B, H, l, R·S)
        yield rotated.unflatten(-1, (rounds, width))


def code_gap(x: Tensor, rotations: Tensor, factors: list[int]) -> float:
    """Return the smallest difference between the two largest scores of a hash in `angular_hash`, relative to the
    longest vector: errors of x far below it change no code. NaN if all vectors are 0.
    """
    gaps = []
    for rotated in _rotated(x, rotations):
        for part in rotated.split([n // 2 for n in factors], dim=-1):
            first, second = torch.cat([part, -part], dim=-1).topk(2).values.unbind(-1)
            gaps.append((first - second).min())
    return float(torch.stack(gaps).min() / x.norm(dim=-1).max())


@operator(differentiable=False)
def sign_codes(x: Tensor, key: Key, heads: range, hashes: int, code_bits: int, kind: Kind) -> Tensor:
    """Compute the codes of x in each hash: bit t is [r_t·x >= 0].

    gaussian: r is normal; two vectors at angle θ collide in a hash with probability (1 − θ/π)^τ.
    hadamard: r·x is a coordinate of HD₃HD₂HD₁x, O(P·log P) for P coordinates. Each bit of a code uses a separate
    transform, so the bits are independent and only each bit's probability can be biased (docs/lab/decisions.md); hash h
    uses coordinate h mod P of its τ transforms.

    The draws are functions of (key, head, hash). Only gaussian codes differ between implementations, if a projection is
    zero up to rounding.

    Args:
        x: (B, H, L, D). All bits of a zero vector are set.
        key: Random key of the draws.
        heads: Global head indices.

    Returns:
        Codes (B, H, m, L), 0 <= code < 2^τ, int16 up to 15 bits, else int32. Computed in fp32 or wider.
    """
    batch, heads_count, length, width = x.shape
    assert len(heads) == heads_count
    planes = hash_planes(key, heads, hashes, code_bits, width, kind, x.device)
    dtype = wide_dtype(x)
    groups = planes.shape[1]
    planes = planes.flatten(1, 2)  # (H, m·τ, D) or (H, groups·τ, 3, P)
    planes = planes.to(dtype) if kind == "gaussian" else torch.where(planes < 0, -1.0, 1.0).to(dtype)
    numbers = planes.shape[1] * (1 if kind == "gaussian" else planes.shape[3])
    codes = torch.empty(batch, heads_count, hashes, length, dtype=code_dtype(1 << code_bits), device=x.device)
    step = max(1, _SIGN_ELEMENTS // (batch * heads_count * numbers))
    for start in range(0, length, step):
        block = x[:, :, start : start + step].to(dtype)
        if kind == "gaussian":
            side = (at_least_rows(block) @ planes.transpose(1, 2))[:, :, : block.shape[2]] >= 0
            side = side.unflatten(-1, (hashes, code_bits))  # (B, H, l, m, τ)
        else:
            y = F.pad(block, (0, planes.shape[-1] - width))[..., None, :]  # (B, H, l, 1, P)
            for diagonal in planes.unbind(2):
                y = hadamard(y * diagonal[:, None])
            side = y.unflatten(-2, (groups, code_bits)) >= 0  # (B, H, l, groups, τ, P)
            side = side.transpose(-1, -2).flatten(-3, -2)[..., :hashes, :]  # (B, H, l, m, τ)
        code = sum(side[..., bit].to(codes.dtype) << bit for bit in range(code_bits))  # (B, H, l, m)
        codes[..., start : start + step] = code.transpose(-1, -2)  # type: ignore[union-attr]
    return codes


def hash_planes(
    key: Key, heads: range, hashes: int, code_bits: int, width: int, kind: Kind, device: torch.device
) -> Tensor:
    """Draw Gaussian hyperplanes, (H, m, τ, D) fp32; or the diagonals D₁, D₂, D₃ of every transform, (H, groups of P
    hashes, τ, 3, P) int32, whose sign bits are the signs.
    """
    assert 1 <= code_bits <= MOST_BITS
    if kind == "gaussian":
        return normal_by_head(key, heads, hashes, code_bits * width, device).view(len(heads), hashes, code_bits, width)
    power = 1 << (width - 1).bit_length()
    groups = -(-hashes // power)
    return bits_by_head(key, heads, groups * code_bits, 3 * power, device).view(len(heads), groups, code_bits, 3, power)


def hadamard(x: Tensor) -> Tensor:
    """Compute Hx over the last dimension, a power of two, without the factor P^−1/2."""
    half = 1
    while half < x.shape[-1]:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)  # (..., P/(2·half), half)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)  # (..., P)
        half *= 2
    return x
