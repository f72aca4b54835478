"""Bucket codes and sign codes: the definitions, blocks of torch, or kernels that write nothing but the codes.

B batch, H heads, L length, D head dim, R rounds, m hashes, τ code bits.
"""

import math

import torch
from torch import Tensor

from megasparse.ops.autocast import without_autocast
from megasparse.ops.backend import implementation
from megasparse.ops.hashing import blockwise, reference, sign


@without_autocast
@torch.no_grad()
def angular_hash(x: Tensor, rotations: Tensor, factors: list[int]) -> Tensor:
    """Compute h(x) = argmax([xR; −xR]) (Reformer section 2), mixed-radix over the factors: h = h_1·n_2 + h_2.

    x: (B, H, L, D). rotations: (H, R, D, Σ n_f/2), the factors' matrices side by side. Returns codes (B, H, R, L),
    int16 where they fit, else int32. Computed in fp32 at least, and never in TF32 by the kernels; not differentiable. A
    factorised hash costs √n where a plain one costs n. Implementations differ only where the two largest scores are
    equal up to rounding.
    """
    chosen = implementation(x)
    if chosen == "reference":
        return reference.angular_hash(x, rotations, factors).to(sign.code_dtype(math.prod(factors)))
    if chosen == "blockwise":
        return blockwise.angular_hash(x, rotations, factors)
    from megasparse.ops.hashing import gpu

    return gpu.angular_hash(x, rotations, factors)


def sign_codes(x: Tensor, key: int, heads: range, hashes: int, code_bits: int, kind: sign.Kind) -> Tensor:
    """Codes of x (B, H, L, D) in each hash: (B, H, m, L), int16 up to 15 bits, else int32; 0 <= code < 2^τ.

    gaussian: bit t is [r·x >= 0], r normal: two vectors at angle θ collide in a hash with probability (1 − θ/π)^τ.
    hadamard: r·x is a coordinate of HD₃HD₂HD₁x, O(P·log P) for P of them. Every bit of ONE code comes from a transform
    of its own, so the bits are independent and only each bit's own probability can be biased; hash h takes coordinate
    h mod P of its τ transforms. Measured at τ = 9 and cosines 0.3, 0.7, 0.9 (±0.3): random pairs collide −0.3, −0.1,
    0.0 % more often than the formula says for D = 64, −0.6, −0.4, −0.2 % for D = 16. With the bits of one code out of
    one transform, Eq. 21 read literally, it is −15, −7, −2 % and −58, −24, −7 %. Vectors of one or two nonzero
    elements fare worse, their projections are often exactly 0: up to −25 % for D = 64, −63 % for 16.

    heads: the heads' global numbers. The draws are functions of (key, head, hash): more hashes keep the first ones.
    Computed in fp32 at least; the length of x does not matter; a zero vector has all bits set. Implementations differ
    only where a projection is zero up to rounding; the kernels' hadamard codes are those of blockwise to the bit.
    """
    assert len(heads) == x.shape[1] and 1 <= code_bits <= sign.MOST_BITS
    if implementation(x) == "reference":
        codes = reference.sign_codes(x, key, heads, hashes, code_bits, kind)
        return codes.to(sign.code_dtype(1 << code_bits))
    return _sign_codes(x, sign.drawn(key, heads, hashes, code_bits, x.shape[3], kind, x.device), hashes, kind)


@without_autocast
@torch.no_grad()
def _sign_codes(x: Tensor, drawn: Tensor, hashes: int, kind: sign.Kind) -> Tensor:
    if implementation(x) == "blockwise":
        return sign.drawn_codes(x, drawn, hashes, kind)
    from megasparse.ops.hashing import gpu

    return gpu.sign_codes(x, drawn, hashes, kind)
