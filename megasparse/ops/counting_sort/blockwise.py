"""The stable order by torch's own sort."""

import torch
from torch import Tensor


def counting_sort(keys: Tensor, bits: int, ordered: Tensor | None = None, reverse: bool = False) -> Tensor:
    """Computes `operator.counting_sort`."""
    values, order = torch.sort(keys, dim=-1, stable=True)
    if reverse:
        values, order = values.flip(-1), order.flip(-1)
    if ordered is not None:
        ordered.copy_(values)
    return order.to(torch.int32)
