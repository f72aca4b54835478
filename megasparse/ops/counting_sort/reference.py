"""The definition of the stable order, to test against."""

import torch
from torch import Tensor


def counting_sort(keys: Tensor, bits: int, ordered: Tensor | None = None, reverse: bool = False) -> Tensor:
    """Positions ordered by (key, position): keys (rows, L), below 2^bits; (rows, L) int32."""
    order = [sorted(range(len(row)), key=lambda i: (row[i], i)) for row in keys.tolist()]
    found = torch.tensor(order, dtype=torch.int32, device=keys.device).view(keys.shape)
    found = found.flip(-1) if reverse else found
    if ordered is not None:
        ordered.copy_(keys.gather(-1, found.long()))
    return found
