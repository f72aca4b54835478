"""Stable sorting of bucket codes: the definition, torch's sort, or kernels that count."""

import torch
from torch import Tensor

from megasparse.ops.backend import implementation
from megasparse.ops.counting_sort import blockwise, reference

_DTYPES = (torch.int16, torch.int32)


@torch.no_grad()
def counting_sort(keys: Tensor, bits: int, ordered: Tensor | None = None, reverse: bool = False) -> Tensor:
    """Sort small integers stably. keys: (rows, L) int16 or int32, 0 <= key < 2^bits, which is not checked. ordered:
    contiguous like keys; the sorted keys are written there. reverse: both are written from the last one to the first.

    Returns (rows, L) int32: [r, i] is the position of row r's i-th smallest key, equal keys in order of position.
    """
    assert keys.dim() == 2 and keys.dtype in _DTYPES and 1 <= bits <= 31
    chosen = implementation(keys, dtypes=_DTYPES, largest_width=None)
    if chosen == "reference":
        return reference.counting_sort(keys, bits, ordered, reverse)
    if chosen == "blockwise":
        return blockwise.counting_sort(keys, bits, ordered, reverse)
    from megasparse.ops.counting_sort import gpu

    return gpu.counting_sort(keys, bits, ordered, reverse)
