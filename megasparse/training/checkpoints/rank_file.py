"""One rank's file of a checkpoint: written in blocks, hashed on the way, on disk before its name counts."""

import errno
import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megasparse.errors import TrainingError
from megasparse.files import open_file
from megasparse.training.checkpoints.checkpoint import Fragment

BLOCK = 1 << 24
"""Numbers (64 MB) that are read, hashed and written at a time."""

SYNC_EVERY = 1 << 30
"""Bytes after which the disk has to keep up: one fsync of all of a large file could take minutes without a word."""


class RankFile:
    """The content of a rank's safetensors file.

    The format is the length of a JSON header (8 bytes), the header, and the numbers, little endian. It is written here
    and not by the library, which would first put all of it together in memory.
    """

    def __init__(self, fragments: list[Fragment]):
        assert sys.byteorder == "little"
        self._fragments = fragments
        header: dict[str, Any] = {}
        self.pieces: list[tuple[str, str, list[int], dict[str, Any]]] = []
        """(kind, name, shape of the whole tensor, where the piece lies) of each fragment."""
        end = 0
        for number, f in enumerate(fragments):
            key, begin, end = str(number), end, end + 4 * f.numel
            header[key] = {"dtype": "F32", "shape": [f.numel], "data_offsets": [begin, end]}
            self.pieces.append((f.kind, f.name, list(f.shape), {"key": key, "start": f.start, "numel": f.numel}))
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # numbers start at a multiple of 8
        self._header = len(text).to_bytes(8, "little") + text
        self.bytes = len(self._header) + end
        """Size of the file."""

    def copy(self, memory: Tensor) -> tuple["RankFile", Tensor]:
        """The same file from copies of the fragments, which what trains on does not change.

        memory: flat, on the CPU, taken where its size fits; returned is the one that was filled.
        """
        sizes = [f.numel for f in self._fragments]
        if memory.numel() != sum(sizes):
            memory = torch.empty(sum(sizes), dtype=torch.float32)
        copies = memory.split(sizes)
        pairs = list(zip(self._fragments, copies, strict=True))
        for f, copy in pairs:
            copy.copy_(f.memory)
        return RankFile([Fragment(f.kind, f.name, f.shape, f.start, copy) for f, copy in pairs]), memory

    def write(self, path: Path, progress: Callable[[], None]) -> str:
        """Write the file; `progress` is called after every block. Returns its SHA-256.

        Raises OSError; TrainingError where a number is not finite.
        """
        digest, unsynced = hashlib.sha256(self._header), 0
        with durable(path, self.bytes) as file:
            file.write(self._header)
            for f in self._fragments:
                for block in f.memory.split(BLOCK):
                    if block.numel():
                        block = block.cpu()
                        # The smallest and the largest are NaN where any number is: 30 times as fast as asking each
                        if not all(map(math.isfinite, torch.aminmax(block))):
                            raise TrainingError(f"{f.kind} of {f.name} holds a number that is not finite")
                        numbers = block.numpy().data.cast("B")
                        digest.update(numbers)
                        file.write(numbers)
                        unsynced += len(numbers)
                    if unsynced >= SYNC_EVERY:
                        _sync(file)
                        unsynced = 0
                    progress()
        return digest.hexdigest()


@contextmanager
def durable(path: Path, size: int) -> Iterator[IO[bytes]]:
    """A new file, not writable by others whatever the umask; on disk, with `size` bytes, when the block ends."""
    with open_file(path, "xb") as file:
        yield file
        _sync(file)
        if (there := os.fstat(file.fileno()).st_size) != size:
            raise OSError(errno.EIO, f"{there:,} of {size:,} bytes were kept", str(path))


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, not writable by others whatever the umask; other ranks may do so too."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with suppress(FileExistsError):
            os.mkdir(folder, 0o755)


def free_bytes(folder: Path) -> int:
    """Bytes free on the file system of a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
