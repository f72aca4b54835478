"""Counts of the bytes of existing tensors: the memory of a pass without noise, on the CPU too."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counter that has, inside the `with`, `live` bytes of the storages made there and `peak`, their largest number
    since `mark`.

    What a kernel takes and gives back inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def mark(self) -> int:
        """The peak since the last mark; the next one begins here."""
        found, self.peak = self.peak, self.live
        return found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {_identity(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and (identity := _identity(x)) not in self._known and identity not in given:
                storage = x.untyped_storage()
                self._known.add(identity)
                self._made(storage.nbytes())
                weakref.finalize(storage, self._release, identity, storage.nbytes())
        return result

    def _made(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.live -= size


class AllocatedBytes:
    """Live bytes of a GPU as torch's allocator counts them, scratch memory of kernels included."""

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> "AllocatedBytes":
        torch.cuda.synchronize(self.device)
        self._before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self.device) - self._before

    def mark(self) -> int:
        found = torch.cuda.max_memory_allocated(self.device) - self._before
        torch.cuda.reset_peak_memory_stats(self.device)
        return found


def _identity(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata
