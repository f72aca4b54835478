"""Stable sorting of small integers, such as bucket codes."""

import torch
from torch import Tensor

from megasparse.ops.operator import operator


@operator(dtypes=(torch.int16, torch.int32), largest_width=None, differentiable=False)
def counting_sort(keys: Tensor, bits: int, ordered: Tensor | None = None, reverse: bool = False) -> Tensor:
    """Sort small integers stably.

    Args:
        keys: (rows, L) int16 or int32, 0 <= key < 2^bits, which is not checked.
        ordered: Contiguous output buffer like keys for the sorted keys, or None.
        reverse: Write both results in reverse order.

    Returns:
        (rows, L) int32: [r, i] is the position of row r's i-th smallest key; equal keys keep their order.
    """
    assert keys.dim() == 2 and keys.dtype in (torch.int16, torch.int32) and 1 <= bits <= 31
    values, order = torch.sort(keys, dim=-1, stable=True)
    if reverse:
        values = values.flip(-1)
        order = order.flip(-1)
    if ordered is not None:
        ordered.copy_(values)
    return order.to(torch.int32)
