"""Files that are there whole or not at all, and what identifies their content."""

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` when the block ends, and vanishes when it fails.

    It is on disk before it has its name: after a crash at any moment `path` is the old file or the whole new one.
    """
    partial = partial_name(path)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def partial_name(path: Path) -> Path:
    """Return the name of a file while it is being written."""
    return path.with_name(f".{path.name}.partial")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as durable as the files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> int:
    """Return a descriptor to read a file. Raises OSError also for a fifo, which would never end, and for a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "this is not a regular file")
    return descriptor


def file_sha256(file: Path | int, progress: Callable[[], None] = lambda: None) -> str:
    """Return the sha256 of a file, given by its path or an open descriptor; `progress` is called every MB."""
    digest = hashlib.sha256()
    with open(file, "rb", closefd=not isinstance(file, int)) as stream:
        stream.seek(0)
        while piece := stream.read(1 << 20):
            digest.update(piece)
            progress()
    return digest.hexdigest()


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which batch_2 precedes batch_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]
