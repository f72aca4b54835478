"""The lock on a run's folder: two runs that write into one folder would destroy each other's records.

The kernel keeps it (flock) and releases it when the process that holds it ends, by SIGKILL too.
"""

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from megasparse.errors import ConfigError, UserError
from megasparse.training.ranks import Ranks

LOCK = ".lock"
"""Name of the file in `run.directory`. It stays when the run has ended; only the lock on it counts."""
LONGEST = 1024
"""Bytes of the lock file that are read, at most."""


class FileLock:
    """An exclusive lock (flock) on the file at `path` until `release`, or until this process ends.

    The kernel keeps such a lock while any process has the open file, and a forked child inherits open files. Children
    therefore close theirs: those made by os.fork (multiprocessing too) at once, others when they start a program.

    Raises BlockingIOError where another holds the lock, and OSError where the file cannot be opened or its file system
    has no locks.
    """

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.descriptor)
            raise
        _held.add(self)

    def release(self) -> None:
        """Let others take the lock. A second call, or one in a forked child, does nothing."""
        if self in _held:
            _held.remove(self)
            os.close(self.descriptor)


_held: set[FileLock] = set()


def _close_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def run_lock(directory: Path, ranks: Ranks) -> Iterator[None]:
    """Keep other runs out of `directory`, which is made where it does not exist. Rank 0 holds the lock for all ranks;
    all of them call this.

    Where the file system has no locks, a warning says so.

    Raises UserError, the same on every rank, where another run holds the lock or the folder cannot be made.
    """
    lock, problem = None, None
    if ranks.rank == 0:
        try:
            lock = _take(directory)
        except ConfigError as error:
            problem = str(error)
    try:
        if (problem := ranks.gather(problem)[0]) is not None:
            raise UserError(problem)
        yield
    finally:
        if lock is not None:
            lock.release()


def _take(directory: Path) -> FileLock | None:
    """Lock `directory` and write the holder's name; None where the file system has no locks. Raises ConfigError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{directory} cannot be made ({error.strerror})"
        raise ConfigError("run.directory", problem, "Choose a folder that can be written") from None
    path = directory / LOCK
    try:
        lock = FileLock(path)
    except BlockingIOError:
        problem = f"{directory} is in use by another run ({_holder(path) or f'{path} does not say which'})"
        raise ConfigError("run.directory", problem, "Choose another run.directory, or end that run first") from None
    except OSError as error:
        problem = f"{path} cannot be locked ({error.strerror})"
        print(f"warning: {problem}: nothing keeps a second run out of this folder", file=sys.stderr)
        return None
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    with suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, f"host {socket.gethostname()}, pid {os.getpid()}, since {since}".encode(), 0)
        os.fsync(lock.descriptor)
    return lock


def _holder(path: Path) -> str:
    """The name that the holder wrote into the lock file, if that is one printable line; "" otherwise."""
    with suppress(OSError), path.open("rb") as file:
        text = file.read(LONGEST).decode(errors="replace")
        if text and text.isprintable():
            return text
    return ""
