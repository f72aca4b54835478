"""Sign codes: a vector's τ bits in each of m hashes are its sides of random hyperplanes (YOSO Eq. 20 and 21).

B batch, H heads, L length, D head dim, P the next power of two, m hashes, τ code bits.
"""

from typing import Literal

import torch
from torch import Tensor

from megasparse.ops.random import normal, random_bits

_BLOCK_ELEMENTS = 1 << 20  # projected numbers at a time: 4 MB of fp32
MOST_BITS = 30  # codes are int32 at most


@torch.no_grad()
def sign_codes(
    x: Tensor, key: int, heads: range, hashes: int, code_bits: int, kind: Literal["hadamard", "gaussian"]
) -> Tensor:
    """Codes of x (B, H, L, D) in each hash: (B, H, m, L), int16 up to 15 bits, else int32; 0 <= code < 2^τ.

    gaussian: bit t is [r·x >= 0], r normal: two vectors at angle θ collide in a hash with probability (1 − θ/π)^τ.
    hadamard: r·x is a coordinate of HD₃HD₂HD₁x, O(P·log P) for P of them. Every bit of ONE code comes from a transform
    of its own, so the bits are independent and only each bit's own probability can be biased; hash h takes coordinate
    h mod P of its τ transforms. Measured at τ = 9 and cosines 0.3, 0.7, 0.9 (±0.3): random pairs collide −0.3, −0.1,
    0.0 % more often than the formula says for D = 64, −0.6, −0.4, −0.2 % for D = 16. With the bits of one code out of
    one transform, Eq. 21 read literally, it is −15, −7, −2 % and −58, −24, −7 %. Vectors of one or two nonzero
    elements fare worse, their projections are often exactly 0: up to −25 % for D = 64, −63 % for 16.

    heads: the heads' global numbers. The draws are functions of (key, head, hash): more hashes keep the first ones.
    Computed in fp32 at least; the length of x does not matter; a zero vector has all bits set.
    """
    assert len(heads) == x.shape[1] and 1 <= code_bits <= MOST_BITS
    batch, _, length, width = x.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    power = 1 << (width - 1).bit_length()
    groups = -(-hashes // power)
    head = torch.arange(heads.start, heads.stop, device=x.device)[:, None] * (1 << 16)
    if kind == "gaussian":
        rows = head + torch.arange(hashes, device=x.device)
        drawn = normal(key, rows, code_bits * width).view(len(heads), -1, width).to(dtype)  # (H, m·τ, D)
        numbers = hashes * code_bits
    else:
        rows = head + torch.arange(groups * code_bits, device=x.device)
        bits = random_bits(key, rows, 3 * power).view(len(heads), -1, 3, power)
        drawn = torch.where(bits < 0, -1.0, 1.0).to(dtype)  # (H, T, 3, P) diagonals of T = groups·τ transforms
        numbers = groups * code_bits * power
    codes = torch.empty(
        batch, len(heads), hashes, length, dtype=torch.int16 if code_bits <= 15 else torch.int32, device=x.device
    )
    step = max(1, _BLOCK_ELEMENTS // (batch * len(heads) * numbers))
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
