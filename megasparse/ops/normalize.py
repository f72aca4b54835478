"""Normalisation: layer norm, RMS norm and unit vectors, such as the keys of shared QK."""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.ops.operator import at_least_fp32, implementation, operator
from megasparse.ops.tiled import tiled

SHORTEST = 1e-12
"""Queries shorter than this are divided by it, so a zero vector stays zero."""
_WIDEST = 16384  # numbers per row in one program
_ELEMENTS = 1 << 24  # numbers normalised at a time: 64 MB of fp32


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Normalise x over its last dimension (Ba et al. 2016), in the dtype of x, in kernels in fp32 or wider.

    Args:
        x: (..., E).
        weight, bias: (E,), of any dtype; without a bias it is RMS normalisation (Zhang and Sennrich 2019), without
            centring.
        eps: Added to the variance.
        dtype: Dtype of the result, by default the dtype of x.

    Returns:
        (..., E).
    """
    dtype = dtype or x.dtype
    if implementation(x, largest_width=_WIDEST) == "triton":
        from megasparse.ops import normalize_kernels

        return normalize_kernels.layer_norm(x, weight, bias, eps, dtype)
    if bias is None:
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps).to(dtype)
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps).to(dtype)


@operator()
def unit_keys(q: Tensor) -> tuple[Tensor, Tensor]:
    """Compute k = q/|q| (Reformer section 2) of q (B, H, L, D), in fp32 or wider, cast back; a zero vector stays zero.

    Returns q and k; the returned q joins the gradients of both in one pass.
    """

    def unit(x: Tensor) -> Tensor:
        return F.normalize(at_least_fp32(x), dim=-1, eps=SHORTEST).to(x.dtype)

    # Tiles over heads, because the backward stores several copies.
    return q, tiled(unit, [q], [], -(-q.numel() // _ELEMENTS))


@operator()
def unit_vectors(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Compute x/|x| of x (B, H, L, D), in fp32 or wider, in `dtype` if given; a zero vector stays zero, and gets no
    gradient.
    """
    x = at_least_fp32(x)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x * torch.where(norm > 0, 1.0 / norm.masked_fill(norm == 0, 1.0), 0.0)).to(dtype or x.dtype)


class Norm(nn.Module):
    """Layer norm or RMS norm of vectors of a width, computed in the dtype of its input (fp32 for streams)."""

    def __init__(self, kind: Literal["layer", "rms"], width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if kind == "layer" else None

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Normalise x (..., E). dtype: dtype of the result; None keeps the dtype of x."""
        return self.by(dict(self.named_parameters()), x, dtype)

    def by(self, weights: Mapping[str, Tensor], x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Apply `forward` with these weights by name."""
        return layer_norm(x, weights["weight"], weights.get("bias"), self.eps, dtype)
