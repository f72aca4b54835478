"""Positive random features, stabilised, and their projections. B batch, H heads, L length, D head dim, F features."""

import math

import torch
from torch import Tensor

from megasparse.ops.autocast import without_autocast
from megasparse.ops.random import derive, normal


@without_autocast
def exponents(x: Tensor, projection: Tensor) -> Tensor:
    """Return φ's exponents ωx − |x|²/2: x (B, H, L, D), projection (H, F, D) -> (B, H, L, F), fp32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x = x.to(dtype)
    return x @ projection.to(dtype).transpose(1, 2) - (x * x).sum(-1, keepdim=True) / 2


@without_autocast
def positive_features(
    x: Tensor, projection: Tensor, *, per_row: bool, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute φ(x) = exp(−|x|²/2)/√F · exp(ωx) (Choromanski et al. 2020, Lemma 1) as features·exp(shift).

    x: (B, H, L, D), already scaled by D^(−1/4) where it is a query or key of softmax(qkᵀ/√D). projection: (H, F, D),
    rows ω. key_mask: (B, L) bool, true for real tokens; padding gets features 0 and counts in no maximum.
    Returns features (B, H, L, F) in [0, 1/√F], fp32 at least, and shift: (B, H, L, 1), each row's largest exponent,
    if per_row, else (B, H, 1, 1), that of all real tokens (future ones too: not for causal sums). The shift has no
    gradient: with it held constant, features·exp(shift) has that of φ.
    """
    exponent = exponents(x, projection)
    if key_mask is not None:
        exponent = exponent.masked_fill(~key_mask[:, None, :, None], -torch.inf)
    shift = exponent.detach().amax(-1 if per_row else (-2, -1), keepdim=True)
    shift = shift.masked_fill(shift == -torch.inf, 0.0)  # nothing but padding
    return torch.exp(exponent - shift) / math.sqrt(projection.shape[1]), shift


def orthogonal_projections(key: int, heads: range, features: int, head_dim: int, device: torch.device) -> Tensor:
    """(H, F, D) fp32: rows ω, each a standard normal vector, in blocks of D that are orthogonal to each other.

    A function of (key, global head number, row): more features keep the first rows, other heads change nothing. Drawn
    on the CPU, so that every device has the same.
    """
    blocks = -(-features // head_dim)
    head = torch.arange(heads.start, heads.stop).unsqueeze(1) * (1 << 16)
    rows = head + torch.arange(blocks)  # (H, blocks)
    shape = (len(heads), blocks, head_dim, head_dim)
    directions, lengths = (normal(derive(key, part), rows, head_dim**2).view(shape) for part in ("rows", "lengths"))
    orthogonal, upper = torch.linalg.qr(directions.double())
    # A factor with a positive diagonal is unique, and makes the directions uniformly distributed.
    orthogonal = orthogonal * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    projection = orthogonal.transpose(-1, -2) * lengths.double().norm(dim=-1, keepdim=True)
    return projection.flatten(1, 2)[:, :features].float().to(device)
