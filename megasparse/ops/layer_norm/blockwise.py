"""Layer normalisation by torch's own."""

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Computes `operator.layer_norm`."""
    if bias is None:
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps).to(dtype or x.dtype)
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps).to(dtype or x.dtype)
