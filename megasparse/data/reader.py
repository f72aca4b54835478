"""Tokens out of the shards by position, without unpacking: each member's place in the tar file is listed once.

Damage is never silent. A shard is verified against its sha256 before its first token is used, again when the file
changed since, and its members must be exactly the samples that the index counts.
"""

import os
import re
import tarfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megasparse.data.index import AGAIN, Index, Shard, verify_shard
from megasparse.errors import DataError

BLOCK = tarfile.BLOCKSIZE
MEMBER_NAME = re.compile(r"\A[0-9]+\.bin\Z")

_verified: dict[tuple[str, str], tuple[int, ...]] = {}
"""(path, sha256) of each shard verified by this process -> its signature then, so that it is hashed once."""


def _signature(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class ShardFile:
    """One open, verified shard. `read` gives any range of its tokens."""

    def __init__(self, path: Path, shard: Shard):
        self.path = path
        self.shard = shard
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(path, f"this shard cannot be read: {error.strerror}", AGAIN) from None
        try:
            self._verify_if_changed()
            self.offsets, sizes = list_members(path, self.descriptor, shard)
        except DataError:
            self.close()
            raise
        self.starts = np.cumsum(sizes) - sizes  # of each member, in tokens from the start of the shard

    def close(self) -> None:
        os.close(self.descriptor)

    def _verify_if_changed(self) -> None:
        key = (str(self.path), self.shard.sha256)
        signature = _signature(os.fstat(self.descriptor))
        if _verified.get(key) != signature:
            verify_shard(self.path, self.shard, self.descriptor)
            _verified[key] = signature

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens start..stop of the shard: int64 (stop - start,). Raises DataError when the file was damaged meanwhile.

        0 <= start < stop <= its tokens.
        """
        assert 0 <= start < stop <= self.shard.tokens, (start, stop, self.shard.tokens)
        self._verify_if_changed()
        raw = bytearray(stop - start)
        view = memoryview(raw)
        member = int(np.searchsorted(self.starts, start, side="right")) - 1
        done = 0
        while done < len(raw):
            inside = start + done - int(self.starts[member])
            end = int(self.starts[member + 1]) if member + 1 < len(self.starts) else self.shard.tokens
            take = min(end - int(self.starts[member]) - inside, len(raw) - done)
            offset = int(self.offsets[member]) + inside
            if os.preadv(self.descriptor, [view[done : done + take]], offset) != take:
                raise DataError(self.path, f"this shard ends before byte {offset + take}", AGAIN)
            done += take
            member += 1
        return torch.frombuffer(raw, dtype=torch.uint8).long()


def list_members(path: Path, descriptor: int, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """Byte offset and size of each member's data: int64 (samples,) each.

    Only plain regular members named by digits are taken: no links, devices, extended or sparse headers. Each header
    moves us forward by a whole block at least, so that no file can hold us up. Raises DataError naming member and
    byte offset.
    """
    offsets: list[int] = []
    sizes: list[int] = []
    position = 0
    while header := _header(path, descriptor, position, len(offsets)):
        data = position + BLOCK
        problem = None
        if header.type != tarfile.REGTYPE or not MEMBER_NAME.match(header.name):
            problem = "is not a sample: a regular file named by digits and .bin is expected"
        elif not 0 < header.size <= shard.bytes - data:
            problem = f"claims {header.size} bytes, where the shard has {shard.bytes - data} left"
        if problem:
            where = f"member {len(offsets)} ({header.name[:60]!a}) at byte {position}"
            raise DataError(path, f"{where} {problem}", AGAIN)
        offsets.append(data)
        sizes.append(header.size)
        position = data + -(-header.size // BLOCK) * BLOCK
    if (len(sizes), sum(sizes)) != (shard.samples, shard.tokens):
        problem = f"it ends at byte {position} after {len(sizes)} samples of {sum(sizes)} tokens"
        raise DataError(path, f"{problem}; the index says {shard.samples} samples of {shard.tokens} tokens", AGAIN)
    return np.asarray(offsets, dtype=np.int64), np.asarray(sizes, dtype=np.int64)


def _header(path: Path, descriptor: int, position: int, member: int) -> tarfile.TarInfo | None:
    """The tar header at a byte offset; None at the end-of-archive mark."""
    block = os.pread(descriptor, BLOCK, position)
    if block == bytes(BLOCK):
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:  # type: ignore[attr-defined]
        raise DataError(path, f"member {member} at byte {position} has no valid header ({error})", AGAIN) from None


class ShardReader:
    """Any range of tokens of any shard of a split; keeps the `open_files` shards last used open."""

    def __init__(self, index: Index, split: str, open_files: int = 16):
        self.index = index
        self.shards = index.split(split).shards
        self.open_files = open_files
        self._open: OrderedDict[int, ShardFile] = OrderedDict()

    def read(self, shard: int, start: int, stop: int) -> Tensor:
        """Tokens start..stop of a shard by its number: int64 (stop - start,). Raises DataError naming a damaged one."""
        return self._file(shard).read(start, stop)

    def _file(self, shard: int) -> ShardFile:
        if shard not in self._open:
            while len(self._open) >= self.open_files:
                self._open.popitem(last=False)[1].close()
            self._open[shard] = ShardFile(self.index.path(self.shards[shard]), self.shards[shard])
        self._open.move_to_end(shard)
        return self._open[shard]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


class EvaluationStream:
    """A split as one stream of tokens, contiguous across its shards, for evaluation.

    `tokens`: its length.
    """

    def __init__(self, index: Index, split: str):
        self.tokens = index.split(split).tokens
        self._reader = ShardReader(index, split, open_files=2)
        counts = np.asarray([shard.tokens for shard in self._reader.shards], dtype=np.int64)
        self._stops = np.cumsum(counts)
        self._starts = self._stops - counts

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens start..stop of the split: int64 (stop - start,). Raises DataError naming a damaged shard.

        0 <= start <= stop <= tokens.
        """
        assert 0 <= start <= stop <= self.tokens, (start, stop, self.tokens)
        if start == stop:
            return torch.empty(0, dtype=torch.long)
        first = int(np.searchsorted(self._stops, start, side="right"))
        last = int(np.searchsorted(self._starts, stop, side="left"))
        pieces = []
        for shard in range(first, last):
            begin, end = int(self._starts[shard]), int(self._stops[shard])
            pieces.append(self._reader.read(shard, max(start, begin) - begin, min(stop, end) - begin))
        return torch.cat(pieces)

    def close(self) -> None:
        self._reader.close()
