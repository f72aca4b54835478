"""Tokens out of the shards by position, without unpacking: each sample's place in the tar file is listed once.

Damage is never silent. A shard is verified against its sha256 before its first token is used, and again when the file
changed since. Damage is an error; or, where a `Damage` is given to count it, `DamagedSample` for the tokens it has.
"""

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megasparse.callbacks import Progress, silent
from megasparse.data.damage import Damage, DamagedSample
from megasparse.data.index import Index
from megasparse.data.index_file import AGAIN, Shard
from megasparse.data.members import (
    BadMember,
    Places,
    Run,
    expected_places,
    find_damage,
    header_bytes,
    list_members,
    open_shard,
    unreadable,
    verify_shard,
)
from megasparse.errors import DataError

Signature = tuple[int, ...]

_examined: dict[tuple[str, str], tuple[Signature, list[Run] | None]] = {}
"""(path, sha256) of each shard examined by this process -> its signature then, so that it is hashed once, and what of
it is damaged: None where it is intact."""


def _signature(status: os.stat_result) -> Signature:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class ShardFile:
    """One open, verified shard. `read` gives any range of its tokens.

    Damage raises DataError. With `damage` it is counted there, and DamagedSample raised for what it concerns.
    `descriptor`: of the file, where it is open already.
    """

    def __init__(
        self,
        path: Path,
        shard: Shard,
        sample_bytes: int | None,
        damage: Damage | None = None,
        descriptor: int | None = None,
    ):
        self.path = path
        self.shard = shard
        self._sample_bytes = sample_bytes
        self._damage = damage
        self._seen: Signature | None = None
        try:
            self.descriptor = open_shard(path) if descriptor is None else descriptor
        except OSError as error:
            raise self._unreadable(error) from None
        try:
            self._examine_if_changed()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.descriptor)

    def _examine_if_changed(self) -> None:
        try:
            signature = _signature(os.fstat(self.descriptor))
            if signature == self._seen:
                return
            places, runs = self._examine(signature)
        except OSError as error:
            raise self._unreadable(error) from None
        self._offsets, sizes = places
        self._starts = np.cumsum(sizes) - sizes  # of each sample, in bytes of data from the start of the shard
        if self._damage is not None:
            self._damage.add(self.shard, runs)
        self._seen = signature

    def _examine(self, signature: Signature) -> tuple[Places, list[Run]]:
        """Places of the samples, and runs of damaged ones. Raises DataError in place of the latter without `damage`."""
        key = (str(self.path), self.shard.sha256)
        seen, runs = _examined.get(key, (None, None))
        if seen != signature or (runs is not None and self._damage is None):
            runs = self._verify()
        if runs is None:
            try:
                places = list_members(self.descriptor, self.shard, self._sample_bytes)
                _examined[key] = (signature, None)
                return places, []
            except BadMember as error:
                runs = self._salvage(DataError(self.path, str(error), AGAIN))
        _examined[key] = (signature, runs)
        nowhere = np.empty(0, dtype=np.int64)
        return expected_places(self.shard, self._sample_bytes) or Places(nowhere, nowhere), runs

    def _verify(self) -> list[Run] | None:
        try:
            verify_shard(self.path, self.shard, self.descriptor, self._sample_bytes if self._damage is None else None)
            return None
        except DataError as error:
            return self._salvage(error)

    def _salvage(self, error: DataError) -> list[Run]:
        if self._damage is None:
            raise error
        return find_damage(self.descriptor, self.shard, self._sample_bytes)

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens start..stop of the shard: int64 (stop - start,). 0 <= start < stop <= its tokens.

        Raises DataError, or DamagedSample, also when the file was damaged meanwhile.
        """
        assert 0 <= start < stop <= self.shard.tokens, (start, stop, self.shard.tokens)
        self._examine_if_changed()
        width = self.shard.width
        raw = self._read_bytes(start * width, stop * width)
        return torch.from_numpy(np.frombuffer(raw, dtype=f"<u{width}").astype(np.int64))

    def _read_bytes(self, start: int, stop: int) -> bytearray:
        member = int(np.searchsorted(self._starts, start, side="right")) - 1
        after = int(np.searchsorted(self._starts, stop, side="left"))
        damage = self._damage
        if damage is not None and (damage.is_lost(self.shard) or damage.overlaps(self.shard, member, after)):
            raise DamagedSample
        raw = bytearray(stop - start)
        view = memoryview(raw)
        done = 0
        while done < len(raw):
            inside = start + done - int(self._starts[member])
            end = int(self._starts[member + 1]) if member + 1 < len(self._starts) else self.shard.data_bytes
            take = min(end - int(self._starts[member]) - inside, len(raw) - done)
            self._read_into(view[done : done + take], member, inside)
            done += take
            member += 1
        return raw

    def _read_into(self, view: memoryview, member: int, inside: int) -> None:
        begin = int(self._offsets[member])
        try:
            count = os.preadv(self.descriptor, [view], begin + inside)
            reason = "cut off" if count < len(view) else None
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
        if reason:
            raise self._failure(Run(member, member + 1, begin - header_bytes(self.shard), reason))

    def _unreadable(self, error: OSError) -> DataError | DamagedSample:
        if self._damage is None:
            return unreadable(self.path, error)
        return self._failure(Run(0, self.shard.samples, 0, f"cannot be read: {error.strerror}"))

    def _failure(self, run: Run) -> DataError | DamagedSample:
        if self._damage is None:
            return DataError(self.path, f"this shard is damaged: {run}", AGAIN)
        self._damage.add(self.shard, [run])
        return DamagedSample()


class ShardReader:
    """Any range of tokens of any shard of a split; keeps the `open_files` shards last used open.

    `progress` is called while a shard is fetched from a URL.
    """

    def __init__(
        self, index: Index, split: str, open_files: int = 16, damage: Damage | None = None, progress: Progress = silent
    ):
        self.index = index
        self._progress = progress
        self.shards = index.split(split).shards
        self.open_files = open_files
        self.damage = damage
        self._open: OrderedDict[int, ShardFile] = OrderedDict()

    def read(self, shard: int, start: int, stop: int) -> Tensor:
        """Tokens start..stop of a shard by its number: int64 (stop - start,).

        Raises DataError naming what is damaged; with `damage` DamagedSample, and DataError when that is too much, or
        when a shard cannot be fetched.
        """
        if self.is_lost(shard):
            raise DamagedSample
        return self._file(shard).read(start, stop)

    def is_lost(self, shard: int) -> bool:
        """Whether every sample of a shard is known to be damaged."""
        return self.damage is not None and self.damage.is_lost(self.shards[shard])

    def _file(self, shard: int) -> ShardFile:
        if shard not in self._open:
            while len(self._open) >= self.open_files:
                self._open.popitem(last=False)[1].close()
            entry = self.shards[shard]
            remote, path = self.index.remote, self.index.path(entry)
            descriptor = remote.open(entry, self._progress) if remote else None
            self._open[shard] = ShardFile(path, entry, self.index.sample_bytes, self.damage, descriptor)
        self._open.move_to_end(shard)
        return self._open[shard]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


class EvaluationStream:
    """A split as one stream of tokens, contiguous across its shards, for evaluation: any damage is an error.

    `tokens`: its length. `progress` is called while a shard is fetched from a URL.
    """

    def __init__(self, index: Index, split: str, progress: Progress = silent):
        self.tokens = index.split(split).tokens
        self._reader = ShardReader(index, split, open_files=2, progress=progress)
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
