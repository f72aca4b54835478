"""One rank's file of a checkpoint, written in blocks, hashed while writing, and synced to disk."""

import copy
import errno
import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megasparse.errors import TrainingError
from megasparse.files import open_file
from megasparse.training.checkpoints.checkpoint import Fragment

BLOCK = 1 << 24
"""Numbers per block that is read, hashed and written: 64 MB."""

SYNC_EVERY = 1 << 30
"""Bytes between fsyncs: one at the end of a large file could block for minutes without progress."""


class RankFile:
    """Content of a rank's safetensors file: length of a JSON header (8 bytes), the header, and the numbers. The
    safetensors library would first assemble the whole file in memory.
    """

    def __init__(self, fragments: list[Fragment]):
        assert sys.byteorder == "little"
        self._fragments = fragments
        header: dict[str, Any] = {}
        self.pieces: list[tuple[str, str, list[int], dict[str, Any]]] = []
        """(kind, name, shape of the whole tensor, key and offset of the piece) per fragment."""
        end = 0
        for number, f in enumerate(fragments):
            key, begin, end = str(number), end, end + 4 * f.numel
            header[key] = {"dtype": "F32", "shape": [f.numel], "data_offsets": [begin, end]}
            self.pieces.append((f.kind, f.name, list(f.shape), {"key": key, "start": f.start, "numel": f.numel}))
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # numbers start at a multiple of 8
        self._header = len(text).to_bytes(8, "little") + text
        self.bytes = len(self._header) + end

    def copy(self, blocks: list[Tensor]) -> "RankFile":
        """Return the same file with copies of the fragments in CPU memory, in `blocks` of BLOCK numbers, extended as
        needed; page-locked for fragments on GPUs, and in blocks because torch would round a larger allocation up to a
        power of two.
        """
        on_gpu = any(f.memory.is_cuda for f in self._fragments)
        pieces, end = [], 0
        for f in self._fragments:
            start = 0
            while start < f.numel:
                number, offset = divmod(end, BLOCK)
                if number == len(blocks):
                    blocks.append(torch.empty(BLOCK, dtype=torch.float32, pin_memory=on_gpu))
                source = f.memory[start : start + BLOCK - offset]
                target = blocks[number][offset : offset + source.numel()]
                target.copy_(source, non_blocking=True)
                pieces.append(replace(f, memory=target))
                start, end = start + source.numel(), end + source.numel()
        if on_gpu:  # the next update overwrites the fragments; 1 GB takes about 40 ms over PCIe 4
            torch.cuda.current_stream().synchronize()
        file = copy.copy(self)
        file._fragments = pieces
        return file

    def write(self, path: Path, progress: Callable[[], None]) -> str:
        """Write the file and return its SHA-256."""
        digest, unsynced = hashlib.sha256(self._header), 0
        with durable(path, self.bytes) as file:
            file.write(self._header)
            for f in self._fragments:
                for block in f.memory.split(BLOCK):
                    if block.numel():
                        block = block.cpu()
                        # aminmax returns NaN if any number is NaN, and is 30 times as fast as isfinite on every number.
                        if not all(map(math.isfinite, torch.aminmax(block))):
                            raise TrainingError(f"{f.kind} of {f.name} contains a number that is not finite")
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
    """Open a new file, writable only by its owner, and sync `size` bytes of it to disk on exit."""
    with open_file(path, "xb") as file:
        yield file
        _sync(file)
        if (written := os.fstat(file.fileno()).st_size) != size:
            raise OSError(errno.EIO, f"{written:,} of {size:,} bytes were written", str(path))


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, writable only by the owner. Safe on several ranks at once."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with suppress(FileExistsError):
            os.mkdir(folder, 0o755)


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the file system of a folder, which need not exist."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
