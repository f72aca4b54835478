"""The lock on a run's folder. Two runs that write into one folder would corrupt each other's files.

The kernel keeps the lock (flock) and releases it when the process ends, even by SIGKILL.
"""

import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from megasparse.errors import ConfigError, UserError
from megasparse.files import LOCK_FILE, FileLock, open_file
from megasparse.training.ranks import Ranks
from megasparse.training.stopping.watchdog import HEARTBEATS

LONGEST = 1024
"""Bytes of the lock file that are read, at most."""


@contextmanager
def run_lock(directory: Path, ranks: Ranks) -> Iterator[None]:
    """Keep other runs out of `directory`, which is created if necessary. All ranks call it; rank 0 holds the lock.

    Without lock support in the file system, print a warning and continue.

    Raises UserError, on every rank, if another run holds the lock or the folder cannot be created.
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
    """Lock `directory` and write the holder's name; None if locks are not supported. Raises ConfigError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = [*directory.iterdir(), *directory.glob(f"{HEARTBEATS}/*")]
        files = {path: path.lstat() for path in paths if not path.is_dir()}
    except OSError as error:
        problem = f"{directory} cannot be created or read ({error.strerror})"
        raise ConfigError("run.directory", problem, "Choose a writable folder") from None
    for path, status in files.items():
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            problem = f"{path} is a link or not a regular file, and the run would write to it"
            hint = "Remove it, replace it with a copy, or choose another run.directory"
            raise ConfigError("run.directory", problem, hint)
    path = directory / LOCK_FILE
    try:
        lock = FileLock(path)
    except BlockingIOError:
        problem = f"{directory} is in use by another run ({_holder(path) or f'not named in {path}'})"
        raise ConfigError("run.directory", problem, "Choose another run.directory, or stop that run first") from None
    except OSError as error:
        problem = f"{path} cannot be locked ({error.strerror})"
        print(f"warning: {problem}: a second run could write to this folder", file=sys.stderr)
        return None
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    with suppress(OSError):  # a full disk: the folder is locked anyway
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, f"host {socket.gethostname()}, pid {os.getpid()}, since {since}".encode(), 0)
        os.fsync(lock.descriptor)
    return lock


def _holder(path: Path) -> str:
    """Return the holder's name from the lock file if it is one printable line, else ""."""
    with suppress(OSError), open_file(path) as file:
        text = file.read(LONGEST).decode(errors="replace")
        if text and text.isprintable():
            return text
    return ""
