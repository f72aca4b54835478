"""Vectors of length 1: the definition, torch, or kernels."""

import torch
from torch import Tensor

from megasparse.ops.backend import implementation
from megasparse.ops.unit_keys import blockwise, reference


def unit_keys(q: Tensor) -> tuple[Tensor, Tensor]:
    """Compute k = q/|q| (Reformer section 2), in fp32 at least, cast back; a zero vector stays zero.

    q: (B, H, L, D). Returns q and k: use this q from here on, so that the gradients of both are joined in one pass.
    """
    chosen = implementation(q)
    if chosen == "reference":
        return reference.unit_keys(q)
    if chosen == "blockwise":
        return blockwise.unit_keys(q)
    from megasparse.ops.unit_keys import gpu

    return gpu.unit_keys(q)


def unit_vectors(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Compute x/|x| of x (B, H, L, D), in fp32 at least; a zero vector stays zero, and gets no gradient. dtype: of the
    result, by default the one that it is computed in.
    """
    if implementation(x) == "triton":
        from megasparse.ops.unit_keys import gpu

        return gpu.unit_vectors(x, dtype)
    return blockwise.unit_vectors(x, dtype)
