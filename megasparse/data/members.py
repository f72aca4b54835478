"""Members of a shard: where each sample lies in the tar file, and which of them are damaged. All is in bytes here.

An intact shard is walked header by header (`list_members`). Of a damaged one the headers are not believed: its samples
are looked for where megasparse prepare-data put them, and each is checked by its own crc32 (`find_damage`), so that a
broken header loses nothing, and one lost sample not the others.
"""

import os
import re
import stat
import tarfile
import zlib
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megasparse.data.files import file_sha256
from megasparse.data.index_file import AGAIN, INDEX_FILE, Shard
from megasparse.data.mds_file import BadMds, mds_places
from megasparse.errors import DataError

BLOCK = tarfile.BLOCKSIZE
MEMBER_NAME = re.compile(r"\A[0-9]+\.bin\Z")
PIECE = 1 << 20
NO_CHECKSUMS = "the shard is damaged, and the index does not say which of its samples"


class Places(NamedTuple):
    """Byte offset and size of each sample's data: int64 (samples,) each."""

    offsets: np.ndarray
    sizes: np.ndarray


class Run(NamedTuple):
    """Consecutive samples first..stop of a shard that are damaged for the same reason."""

    first: int
    stop: int
    byte: int
    """Offset in the tar file of the first one's header."""
    reason: str

    def __str__(self) -> str:
        members = f"member {self.first}" if self.stop == self.first + 1 else f"members {self.first} to {self.stop - 1}"
        return f"{members} at byte {self.byte}: {self.reason}"


class BadMember(Exception):
    """A shard's structure is not that of samples. The message names member and byte offset."""

    def __init__(self, byte: int, problem: str):
        super().__init__(problem)
        self.byte = byte


def open_shard(path: Path) -> int:
    """A descriptor of the file. Raises OSError also for what is no regular file: a fifo would never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "this is not a regular file")
    return descriptor


def list_members(descriptor: int, shard: Shard, sample_bytes: int | None) -> Places:
    """Places of the samples of an intact shard, by its headers where it has any. Raises BadMember.

    sample_bytes: of every sample but the last, where the index says it; a .bin file has no headers, and needs it.
    """
    if shard.kind == "bin":
        if (found := expected_places(shard, sample_bytes)) is None:
            raise BadMember(shard.start, f"its {shard.samples} samples are not of the size that the index says")
        return found
    if shard.kind == "mds":
        try:
            places, end = Places(*mds_places(descriptor, shard.bytes, shard.width)), shard.bytes
        except BadMds as error:
            raise BadMember(0, str(error)) from None
    else:
        places, end = walk(descriptor, shard.bytes, shard.width)
    samples, size = len(places.sizes), int(places.sizes.sum())
    if (samples, size) != (shard.samples, shard.data_bytes):
        problem = f"it ends at byte {end} after {samples} samples of {size} bytes"
        stated = f"the index says {shard.samples} samples of {shard.data_bytes} bytes"
        raise BadMember(end, f"{problem}; {stated}")
    return places


def walk(descriptor: int, total: int, width: int) -> tuple[Places, int]:
    """Places of the samples of a tar file of `total` bytes, by its headers, and the offset of its end mark.

    Only plain regular members named by digits are taken: no links, devices, extended or sparse headers. Each header
    moves us forward by a whole block at least, so that no file can hold us up. Raises BadMember.
    """
    offsets: list[int] = []
    sizes: list[int] = []
    position = 0
    while header := _header(descriptor, position, len(offsets)):
        data = position + BLOCK
        problem = None
        if header.type != tarfile.REGTYPE or not MEMBER_NAME.match(header.name):
            problem = "is not a sample: a regular file named by digits and .bin is expected"
        elif not 0 < header.size <= total - data:
            problem = f"claims {header.size} bytes, where the shard has {total - data} left"
        elif header.size % width:
            problem = f"has {header.size} bytes, no whole number of tokens of {width}"
        if problem:
            raise BadMember(position, f"member {len(offsets)} ({header.name[:60]!a}) at byte {position} {problem}")
        offsets.append(data)
        sizes.append(header.size)
        position = data + _padded(header.size)
    return Places(np.asarray(offsets, dtype=np.int64), np.asarray(sizes, dtype=np.int64)), position


def _header(descriptor: int, position: int, member: int) -> tarfile.TarInfo | None:
    """The tar header at a byte offset; None at the end-of-archive mark."""
    block = os.pread(descriptor, BLOCK, position)
    if block == bytes(BLOCK):
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:  # type: ignore[attr-defined]
        raise BadMember(position, f"member {member} at byte {position} has no valid header ({error})") from None


def expected_places(shard: Shard, sample_bytes: int | None) -> Places | None:
    """Places of samples as prepare.py writes them: all of `sample_bytes` but the last, and nothing but them in a .bin
    file. None where the index differs, and where only the file's own headers say it.
    """
    total, header = shard.data_bytes, header_bytes(shard)
    if (
        shard.kind == "mds"
        or sample_bytes is None
        or not (shard.samples - 1) * sample_bytes < total <= shard.samples * sample_bytes
    ):
        return None
    size = min(sample_bytes, total)
    if size % shard.width:
        return None
    each = header + _padded(size) if header else size
    offsets = shard.start + header + np.arange(shard.samples, dtype=np.int64) * each
    sizes = np.full(shard.samples, size, dtype=np.int64)
    sizes[-1] = total - (shard.samples - 1) * size
    return Places(offsets, sizes) if offsets[-1] + sizes[-1] <= shard.start + shard.bytes else None


def header_bytes(shard: Shard) -> int:
    """Bytes before each sample that are its own header."""
    return BLOCK if shard.kind == "tar" else 0


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def find_damage(descriptor: int, shard: Shard, sample_bytes: int | None) -> list[Run]:
    """The samples of a shard that are not at their place in the content that the index's crc32 states.

    All of them where the index has no crc32.
    """
    places = expected_places(shard, sample_bytes)
    if shard.crc32 is None or places is None:
        return [Run(0, shard.samples, 0, NO_CHECKSUMS)]
    runs: list[Run] = []
    for member, (offset, size) in enumerate(zip(*map(np.ndarray.tolist, places), strict=True)):
        reason = _damage(descriptor, offset, size, shard.crc32[8 * member : 8 * member + 8])
        if reason and runs and (runs[-1].stop, runs[-1].reason) == (member, reason):
            runs[-1] = runs[-1]._replace(stop=member + 1)
        elif reason:
            runs.append(Run(member, member + 1, offset - header_bytes(shard), reason))
    return runs


def _damage(descriptor: int, offset: int, size: int, expected: str) -> str | None:
    crc32 = 0
    try:
        while size:
            piece = os.pread(descriptor, min(size, PIECE), offset)
            if not piece:
                return "cut off"
            crc32 = zlib.crc32(piece, crc32)
            offset += len(piece)
            size -= len(piece)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if f"{crc32:08x}" == expected else "its crc32 differs"


def check_size(path: Path, shard: Shard, file: Path | int, sample_bytes: int | None) -> None:
    """Raises DataError unless `file` (the shard at `path`, or its descriptor) has the size the index states, and room
    for its tokens.

    It names the shard and, where that can be found, the first damaged member and its byte offset.
    """
    try:
        size = os.stat(file).st_size
        if shard.kind == "bin":  # of which it may be a part
            size = min(size - shard.start, shard.bytes)
        problem = f"this shard has {size} bytes, {INDEX_FILE} says {shard.bytes}" if size != shard.bytes else None
        if problem is None and size < shard.data_bytes:
            problem = f"this shard has {size} bytes, too few for {shard.tokens} tokens of {shard.width} bytes each"
        if problem is not None:
            raise DataError(path, problem + _first_damage(shard, file, sample_bytes), AGAIN)
    except OSError as error:
        raise unreadable(path, error) from None


def verify_shard(path: Path, shard: Shard, file: Path | int, sample_bytes: int | None) -> None:
    """Raises DataError, as `check_size` does, unless the file has the size and sha256 of the index."""
    check_size(path, shard, file, sample_bytes)
    try:
        digest = file_sha256(file, start=shard.start, size=shard.bytes)
        if digest != shard.sha256:
            stated = f"{INDEX_FILE} says {shard.sha256[:12]}…"
            problem = f"this shard is damaged: its sha256 is {digest[:12]}…, {stated}"
            raise DataError(path, problem + _first_damage(shard, file, sample_bytes), AGAIN)
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(path, f"this shard cannot be read: {error.strerror}", AGAIN)


def _first_damage(shard: Shard, file: Path | int, sample_bytes: int | None) -> str:
    """The first damaged member by crc32 or structure, to end a message with; empty where neither finds one."""
    descriptor = file if isinstance(file, int) else open_shard(file)
    found: list[tuple[int, str]] = []
    try:
        runs = find_damage(descriptor, shard, sample_bytes)
        found += [(run.byte, str(run)) for run in runs[:1] if run.reason != NO_CHECKSUMS]
        list_members(descriptor, shard, sample_bytes)
    except BadMember as error:
        found.append((error.byte, str(error)))
    finally:
        if not isinstance(file, int):
            os.close(descriptor)
    return f"; {min(found, key=itemgetter(0))[1]}" if found else ""
