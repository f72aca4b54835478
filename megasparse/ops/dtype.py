"""The precision that numbers are added up in."""

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, or in its own dtype where that is wider (fp64)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
