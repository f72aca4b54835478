"""Keys of random draws, and where they are: numbers of the host, or memory of a device that a graph reads.

A graph, compiled by torch.compile or captured by CUDA, runs again for other steps. Its launches then have the arguments
of the step that it was made in, so the keys of its draws cannot be arguments. They stand in tensors.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union, overload

import torch
from torch import Tensor

from megasparse.ops.custom import constant_in_graphs, custom

Part = int | str
Path = tuple[tuple[Part, ...], ...]
"""What a key is derived from, but for the step: (seed, what follows the step), then what further keys follow from."""
Key = Union[int, "LateKey"]
"""A 64-bit number, or one whose step only a graph's run knows."""
Halves = tuple[int, int] | Tensor
"""The low and the high 32 bits of a key, signed: arguments of a launch, or (2,) int32 on a device."""


class DeviceStep:
    """A step whose keys are in a device's memory, for a captured CUDA graph: `set` another one, and a replay draws what
    that one draws.

    >>> step = DeviceStep(0, device)
    >>> rng = RngContext(seed, step, samples, training=True)
    >>> train(batch, rng)                      # makes the memory of the keys that it draws with
    >>> with torch.cuda.graph(graph):
    ...     train(batch, rng)
    >>> step.set(1)
    >>> graph.replay()                         # the draws of step 1, to the bit
    """

    def __init__(self, number: int, device: torch.device | str):
        self.number = torch.tensor(number, device="cpu")
        self._device = torch.empty(0, device=device).device  # "cuda" has a number
        self._known: dict[tuple[Path, ...], Tensor] = {}

    def set(self, number: int) -> None:
        """Another step, in the same memory: one copy to the device, for which the host does not wait."""
        self.number.fill_(number)
        if self._known:
            found = _words([_at(path, number) for paths in self._known for path in paths], self._device)
            torch._foreach_copy_(list(self._known.values()), list(found.split([len(paths) for paths in self._known])))

    def words(self, paths: tuple[Path, ...], device: torch.device) -> Tensor:
        """The halves of keys, (n, 2) int32: on its device always the same memory, elsewhere what they are now.
        RuntimeError where a graph is being captured and they were not asked for before.
        """
        found = self._known.get(paths) if device == self._device else None
        if found is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("these draws have no memory yet: run once what is captured, before it is captured")
            found = _words([_at(path, int(self.number)) for path in paths], device)
        if device == self._device:
            self._known[paths] = found
        return found


@dataclass(frozen=True)
class LateKey:
    """A key of a step that is in memory: a tensor of the host (one number), inside torch.compile; or a DeviceStep."""

    step: Tensor | DeviceStep
    path: Path


@overload
def derive(first: LateKey, *parts: Part) -> LateKey: ...
@overload
def derive(first: Part, *parts: Part) -> int: ...
def derive(first: Part | LateKey, *parts: Part) -> int | LateKey:
    """A 64-bit key from numbers and words: equal parts, equal key, on every machine."""
    if isinstance(first, LateKey):
        return LateKey(first.step, (*first.path, parts))
    return _derived(first, *parts)


@constant_in_graphs
def _derived(*parts: Part) -> int:
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _at(path: Path, step: int) -> int:
    """The key of a step."""
    (seed, *rest), *more = path
    key = _derived(seed, step, *rest)
    for parts in more:
        key = _derived(key, *parts)
    return key


def halves(key: Key | Halves, device: torch.device) -> Halves:
    """A key as what draws read: in a graph a tensor of the device, else numbers. Halves stay as they are."""
    if isinstance(key, (Tensor, tuple)):
        return key
    if isinstance(key, LateKey) or torch.compiler.is_compiling():
        return words((key,), device)[0]
    return _signed(key), _signed(key >> 32)


def words(keys: Sequence[Key], device: torch.device) -> Tensor:
    """The halves of many keys, (n, 2) int32 on the device. They are copied there without a wait."""
    first = keys[0]
    if not isinstance(first, LateKey):
        return _words([key for key in keys if isinstance(key, int)], device)
    paths = tuple(key.path for key in keys if isinstance(key, LateKey))
    return _late_words(first.step, paths, device) if isinstance(first.step, Tensor) else first.step.words(paths, device)


@custom(lambda step, paths, device: torch.empty(len(paths), 2, dtype=torch.int32, device=device), copies=True)
def _late_words(step: Tensor, paths: tuple[Path, ...], device: torch.device) -> Tensor:
    number = int(step)
    return _words([_at(path, number) for path in paths], device)


def _words(keys: Sequence[int], device: torch.device) -> Tensor:
    signed = [[_signed(key), _signed(key >> 32)] for key in keys]
    pinned = device.type == "cuda" and not torch.compiler.is_compiling()
    return torch.tensor(signed, dtype=torch.int32, pin_memory=pinned).to(device, non_blocking=True)


def _signed(x: int) -> int:
    """The low 32 bits of x as a signed number."""
    return ((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
