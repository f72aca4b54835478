"""Layer and RMS normalisation: the definition, torch's, or kernels that also convert."""

import torch
from torch import Tensor

from megasparse.ops.backend import implementation
from megasparse.ops.layer_norm import blockwise, reference

_WIDEST = 16384
"""Numbers of a row that one program holds."""


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Normalise x (..., E) over its last dimension (Ba et al. 2016), in the dtype of x, fp32 at least in kernels.

    weight, bias: (E,), of any dtype; without a bias it is RMS normalisation (Zhang and Sennrich 2019), which does not
    centre. dtype: of the result, by default that of x. Returns (..., E).
    """
    dtype = dtype or x.dtype
    chosen = implementation(x, largest_width=_WIDEST)
    if chosen == "reference":
        return reference.layer_norm(x, weight, bias, eps, dtype)
    if chosen == "blockwise":
        return blockwise.layer_norm(x, weight, bias, eps, dtype)
    from megasparse.ops.layer_norm import gpu

    return gpu.layer_norm(x, weight, bias, eps, dtype)
