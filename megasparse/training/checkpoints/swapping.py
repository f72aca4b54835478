"""ZeRO 3 with weights or optimizer state on a disk (`device` "nvme"): where they lie, whether they fit, how to get at
them.

DeepSpeed moves the optimizer's state by sub-groups (`sub_group_size` numbers): it reads one in, updates it and writes
it out again, so that memory holds one at a time. Checkpoints do the same.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megasparse.errors import ConfigError, StorageError
from megasparse.training.checkpoints.checkpoint import Storage
from megasparse.training.checkpoints.swap_folder import SwapFolder, verify
from megasparse.training.ranks import Ranks

ADAM_BYTES = 16
"""On the disk for each number that a rank updates: fp32 weight, both moments, gradient."""


BUFFER_SIZE = 10**8
"""DeepSpeed's default of `offload_param.buffer_size`: numbers of a rank's piece of one weight."""


class SubGroup(Storage):
    """Optimizer state that DeepSpeed swaps as one. zero: DeepSpeed's optimizer of stage 3."""

    def __init__(self, zero: Any, number: int):
        self._zero, self._number = zero, number

    @contextmanager
    def loaded(self, changing: bool = False) -> Iterator[None]:
        self._zero._optimizer_states_and_gradient_swap_in(self._number)
        try:
            yield
        finally:
            if changing:
                self._zero._optimizer_states_and_gradient_swap_out(self._number)
            else:
                self._zero._release_swap_buffers(self._number)


def swapped_sections(zero: Mapping[str, Any]) -> list[str]:
    """The sections of `zero_optimization` that move something to a disk."""
    return [key for key in ("offload_optimizer", "offload_param") if (zero.get(key) or {}).get("device") == "nvme"]


class Swap:
    """This rank's folders on the disks of `nvme_path`, until `close`. Nothing at all where no section asks for a disk.

    Raises on all ranks: ConfigError where a folder cannot serve or a buffer is too small, StorageError where the ranks
    of a node have not enough room together.
    """

    def __init__(self, zero: Mapping[str, Any], model: nn.Module, ranks: Ranks):
        self._zero = zero
        self._folders: dict[Path, SwapFolder] = {}
        """By `nvme_path`."""
        self._optimizer: Any = None
        self._sections = swapped_sections(zero)
        if not self._sections:
            return
        if "offload_param" in self._sections:
            _check_buffers(zero["offload_param"].get("buffer_size", BUFFER_SIZE), model, ranks.world_size)
        problem = None
        try:
            self._open()
        except ConfigError as error:
            problem = [error.key, error.problem, error.hint]
        if reported := [problem for problem in ranks.gather(problem) if problem is not None]:
            self.close()
            raise ConfigError(*reported[0])
        self._check_room(model, ranks)

    def section(self) -> dict[str, Any]:
        """`zero_optimization` with this rank's own folders in place of `nvme_path`."""
        own = {key: {**self._zero[key], "nvme_path": str(self._folder(key).path)} for key in self._sections}
        return {**self._zero, **own}

    def attach(self, optimizer: Any) -> None:
        """Take DeepSpeed's optimizer, whose files are to be watched."""
        self._optimizer = optimizer
        self.verify()

    def verify(self) -> None:
        """Raise StorageError where the disk did not keep what was written.

        To be called before DeepSpeed reads it again: where a file is too short, that ends the process.
        """
        if not self._sections:
            return
        if self._optimizer.optimizer_swapper is not None:
            self._optimizer.optimizer_swapper.flush_gradients()
        verify(dict(self._files()))

    def close(self) -> None:
        """Delete the folders."""
        for folder in self._folders.values():
            folder.remove()

    def _path(self, key: str) -> Path:
        return Path(self._zero[key]["nvme_path"]).absolute()

    def _folder(self, key: str) -> SwapFolder:
        return self._folders[self._path(key)]

    def _open(self) -> None:
        for key in self._sections:
            if (path := self._path(key)) not in self._folders:
                self._folders[path] = SwapFolder(path, f"deepspeed.zero_optimization.{key}.nvme_path")

    def _check_room(self, model: nn.Module, ranks: Ranks) -> None:
        """Count what all ranks of this node need of each file system before anything is written."""
        node = os.uname().nodename
        own = [[node, self._folder(key).device, _needed(key, model, ranks.world_size)] for key in self._sections]
        everyone = [need for needs in ranks.gather(own) for need in needs]
        problem = None
        for folder in self._folders.values():
            needed = sum(size for *where, size in everyone if where == [node, folder.device])
            if needed > (free := folder.free_bytes()):
                text = f"no room for what is swapped: {needed:,} bytes needed, {free:,} bytes free"
                problem = [str(folder.path.parent), text, "Make room, or give another nvme_path"]
        if reported := [problem for problem in ranks.gather(problem) if problem is not None]:
            self.close()
            raise StorageError(*reported[0])

    def _files(self) -> Iterator[tuple[str, int]]:
        """Every file that has been written, and its bytes."""
        zero: Any = self._optimizer
        swapper: Any = zero.optimizer_swapper
        for info in swapper.swap_params_info.values() if swapper is not None else ():
            size = swapper._io_aligned_numel(info.numel()) * swapper.swap_element_size
            yield from ((path, size) for path in info.get_swap_paths())
            for gradient in info.swapped_gradients.values():
                yield gradient.path, gradient.length * swapper.swap_element_size
        swapper = zero.fp16_groups[0][0].nvme_swapper
        for number, path in swapper.id_to_path.items() if swapper is not None else ():
            yield path, swapper._io_aligned_numel(swapper.param_id_to_numel[number]) * swapper.swap_element_size


def _check_buffers(size: float, model: nn.Module, world_size: int) -> None:
    name, weight = max(model.named_parameters(), key=lambda item: item[1].numel())
    if size < (piece := -(-weight.numel() // world_size)):
        key = "deepspeed.zero_optimization.offload_param.buffer_size"
        problem = f"{size:,.0f} is too few for a rank's {piece:,} numbers of {name}"
        raise ConfigError(key, problem, f"Set it to {piece} or more")


def _needed(key: str, model: nn.Module, world_size: int) -> int:
    """Bytes at most that a rank writes for a section."""

    def size(weight: Tensor) -> int:
        return ADAM_BYTES * weight.requires_grad if key == "offload_optimizer" else weight.element_size()

    return sum(-(-weight.numel() // world_size) * size(weight) for weight in model.parameters())
