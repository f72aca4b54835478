"""One shard, read by position without unpacking: the index gives the offset of each sample in its tar file.

A shard is verified against its size and sha256 before its first token is used, and again when the file changes.
"""

import os
import zlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megasparse.data.index_file import AGAIN, INDEX_FILE, TAR_HEADER, Shard, tar_stride
from megasparse.errors import DataError
from megasparse.files import file_sha256, open_regular
from megasparse.system import read_at

if TYPE_CHECKING:
    from torch import Tensor

Signature = tuple[int, ...]

_verified: dict[tuple[str, str], Signature] = {}
"""(path, sha256) of each shard that this process has verified -> the file's signature then: it is hashed once."""


def reading(path: Path) -> AbstractContextManager[None]:
    """Convert an OSError to DataError."""
    return DataError.instead_of(OSError, path, "this shard cannot be read: {}", AGAIN)


def check_size(path: Path, shard: Shard, file: Path | int) -> None:
    """Raise DataError unless the size of `file` (the shard at `path`, or its descriptor) equals the index's."""
    with reading(path):
        size = os.stat(file).st_size
    if size != shard.bytes:
        raise DataError(path, f"this shard has {size} bytes, {INDEX_FILE} says {shard.bytes}", AGAIN)


def verify_shard(path: Path, shard: Shard, file: int, sample_bytes: int) -> None:
    """Raise DataError unless size and sha256 equal those in the index. It names the first damaged sample if the index
    contains crc32 checksums.
    """
    check_size(path, shard, file)
    with reading(path):
        digest = file_sha256(file)
        if digest != shard.sha256:
            problem = f"this shard is damaged: its sha256 is {digest[:9]}…, not {shard.sha256[:9]}…"
            raise DataError(path, problem + _first_damage(shard, file, sample_bytes), AGAIN)


def _first_damage(shard: Shard, file: int, sample_bytes: int) -> str:
    """Return the end of a message that names the first sample with another crc32; empty if there is none."""
    with open(file, "rb", closefd=False) as stream:
        for number in range(len(shard.crc32 or "") // 8):
            start = number * tar_stride(sample_bytes)
            stream.seek(start + TAR_HEADER)
            remaining, crc32 = min(sample_bytes, shard.data_bytes - number * sample_bytes), 0
            while remaining and (piece := stream.read(min(remaining, 1 << 20))):
                crc32, remaining = zlib.crc32(piece, crc32), remaining - len(piece)
            if f"{crc32:08x}" != (shard.crc32 or "")[8 * number : 8 * number + 8]:
                return f"; the first damaged sample is number {number}, at byte {start}"
    return ""


class ShardFile:
    """One open, verified shard. sample_bytes: size of every sample but the last."""

    def __init__(self, path: Path, shard: Shard, sample_bytes: int):
        self.path, self.shard, self._sample_bytes = path, shard, sample_bytes
        with reading(path):
            self.descriptor = open_regular(path)
        try:
            self._verify_if_changed()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.descriptor)

    def _verify_if_changed(self) -> None:
        key = (str(self.path), self.shard.sha256)
        with reading(self.path):
            status = os.fstat(self.descriptor)
        signature = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if _verified.get(key) != signature:
            verify_shard(self.path, self.shard, self.descriptor, self._sample_bytes)
            _verified[key] = signature

    def read(self, start: int, stop: int) -> "Tensor":
        """Return tokens start..stop of the shard: int64 (stop - start,). Raises DataError if the file is damaged or
        unreadable.
        """
        import torch

        assert 0 <= start < stop <= self.shard.tokens, (start, stop, self.shard.tokens)
        self._verify_if_changed()
        width = self.shard.width
        raw = bytearray((stop - start) * width)
        view = memoryview(raw)
        position = start * width  # in the data of all samples, one after another
        while view:
            sample, inside = divmod(position, self._sample_bytes)
            part = view[: self._sample_bytes - inside]
            offset = sample * tar_stride(self._sample_bytes) + TAR_HEADER + inside
            with reading(self.path):
                count = read_at(self.descriptor, part, offset)
            if count < len(part):
                problem = f"this shard is damaged: sample {sample} is cut off at byte {offset + count}"
                raise DataError(self.path, problem, AGAIN)
            view, position = view[count:], position + count
        return torch.from_numpy(np.frombuffer(raw, dtype=f"<u{width}").astype(np.int64))
