"""The lock on a run's folder: two runs that write into one folder would destroy each other's records.

The kernel keeps it (flock) and releases it when the process that holds it ends, by SIGKILL too.
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
        paths = [*directory.iterdir(), *directory.glob(f"{HEARTBEATS}/*")]
        files = {path: path.lstat() for path in paths if not path.is_dir()}
    except OSError as error:
        problem = f"{directory} cannot be made or read ({error.strerror})"
        raise ConfigError("run.directory", problem, "Choose a folder that can be written") from None
    for path, status in files.items():
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            problem = f"{path} is a link or not a regular file, and a run writes its files there"
            hint = "Remove it, replace it by a copy, or choose another run.directory"
            raise ConfigError("run.directory", problem, hint)
    path = directory / LOCK_FILE
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
    with suppress(OSError), open_file(path) as file:
        text = file.read(LONGEST).decode(errors="replace")
        if text and text.isprintable():
            return text
    return ""
