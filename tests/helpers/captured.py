"""What a captured CUDA graph does, without a GPU: the same launches with the same arguments in the same memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megasparse.ops.kernels import Launch, observed

_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "repeat_interleave")
"""Operations whose results, or their shapes, the host waits for."""


class Captured(TorchDispatchMode):
    """Runs what is inside the `with`, and records it; `replay` runs it again. Numbers are those of the recording, and
    tensors have the same memory. An operation that the host would wait for fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], None]] = []

    def __enter__(self) -> "Captured":
        self._kernels = observed(self._launch)
        self._kernels.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kernels.__exit__(*error)

    def replay(self) -> None:
        for step in self._steps:
            step()

    def _launch(self, launch: Launch) -> None:
        self._steps.append(launch.start)
        with _disable_current_modes():
            launch.start()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in _READS, f"the host reads what {name} gives"
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self._steps.append(partial(_again, function, args, kwargs, result))
        return result


@torch.no_grad()
def _again(function: Any, args: Any, kwargs: Any, result: Any) -> None:
    found = function(*args, **kwargs)
    for old, new in zip(tree_leaves(result), tree_leaves(found), strict=True):
        if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            old.copy_(new)
