"""Unit vectors in torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.ops.blocks import at_most
from megasparse.ops.dtype import at_least_fp32
from megasparse.ops.tiled import tiled

_ELEMENTS = 1 << 24  # numbers normalised at a time: 64 MB of fp32


def unit_keys(q: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `operator.unit_keys`, some heads at a time where q is large: the backward takes several copies."""

    def unit(x: Tensor) -> Tensor:
        return F.normalize(at_least_fp32(x), dim=-1).to(x.dtype)

    return q, tiled(unit, [q], [], -(-q.numel() // at_most(_ELEMENTS)))


def unit_vectors(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Computes `operator.unit_vectors`."""
    x = at_least_fp32(x)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x * torch.where(norm > 0, 1.0 / norm.masked_fill(norm == 0, 1.0), 0.0)).to(dtype or x.dtype)
