"""One call of each operator's kernels, forward and backward, for whatever has to see all of them.

A case takes a dtype and a head dim and calls kernels as a model does; within `ops.kernels.recorded` nothing runs.
"""

from collections.abc import Callable

import torch

Case = Callable[[torch.dtype, int], None]
CASES: dict[str, Case] = {}
"""By operator."""
HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function
