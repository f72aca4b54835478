"""The definition of layer normalisation, to test against."""

import torch
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute weight·(x − mean)/√(variance + eps) + bias over the last dimension; without a bias
    weight·x/√(mean(x²) + eps).
    """
    if bias is None:
        return (weight.to(x.dtype) * x / ((x * x).mean(-1, keepdim=True) + eps).sqrt()).to(dtype)
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return (weight.to(x.dtype) * centred / (variance + eps).sqrt() + bias.to(x.dtype)).to(dtype)
