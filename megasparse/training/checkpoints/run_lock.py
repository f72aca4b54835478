"""The lock on a run's folder: two runs that write into one folder would destroy each other's records.

On one machine the kernel decides: flock, which ends with its holder. Between machines flock may last longer than its
holder (a file server keeps the lock of a node that has vanished), or not reach the other machine at all. There the
heartbeat of the holder's rank 0 decides, which a living run rewrites twice a second: whoever comes watches it for half
a minute. No clocks are compared between hosts.
"""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from megasparse.errors import ConfigError, UserError
from megasparse.training.checkpoints.file_lock import FileLock
from megasparse.training.ranks import Ranks
from megasparse.training.stopping.watchdog import boot_id, last_heartbeat

LOCK = ".lock"
"""Name of the file in `run.directory`. It stays when the run has ended; only the lock on it counts."""
LONGEST = 1024
"""Bytes of the lock file that are read, at most."""
VANISHED = 30.0
"""Seconds without a new heartbeat, of sixty there should be, after which the holder on another machine has vanished."""
POLL = 1.0

HINT = "Choose another run.directory, or end that run first"


class RunLock:
    """What rank 0 holds of a folder until `release`; on other ranks nothing, and `lost` is never true."""

    def __init__(self, path: Path | None = None, lock: FileLock | None = None):
        self._path, self._lock = path, lock
        self._file = path.stat().st_ino if path else None

    def lost(self) -> bool:
        """Whether another run has put its own file in the place of ours, because this one seemed to have vanished."""
        if self._path is None:
            return False
        try:
            return self._path.stat().st_ino != self._file
        except OSError:  # a disk that does not answer, or a file deleted by hand, is no other run
            return False

    def release(self) -> None:
        """Let others take the lock."""
        if self._lock is not None:
            self._lock.release()


@contextmanager
def run_lock(directory: Path, ranks: Ranks) -> Iterator[RunLock]:
    """Keep other runs out of `directory`, which is made where it does not exist. Rank 0 holds the lock for all ranks;
    all of them call this.

    Where the file cannot be locked, a warning says so, and heartbeats alone keep others out.

    Raises UserError, the same on every rank, where another run holds the lock or the folder cannot be made.
    """
    lock, problem = RunLock(), None
    if ranks.rank == 0:
        try:
            lock = _take(directory)
        except ConfigError as error:
            problem = str(error)
    try:
        if (problem := ranks.gather(problem)[0]) is not None:
            raise UserError(problem)
        yield lock
    finally:
        lock.release()


def _take(directory: Path) -> RunLock:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{directory} cannot be made ({error.strerror})"
        raise ConfigError("run.directory", problem, "Choose a folder that can be written") from None
    path, lock, held, flock = directory / LOCK, None, False, True
    found = _said(path)
    try:
        lock = FileLock(path, os.O_CREAT)
    except BlockingIOError:
        held = True
    except OSError as error:
        flock = False
        problem = f"{path} cannot be locked ({error.strerror})"
        print(f"warning: {problem}: only heartbeats keep a second run out of this folder", file=sys.stderr)
    holder = _holder_elsewhere(directory, found, flock)
    if held and holder is None:
        raise ConfigError(
            "run.directory",
            f"{directory} is in use by another run ({_said(path) or f'{path} does not say which'})",
            HINT,
        )
    if holder is not None:
        if lock is not None:
            lock.release()
        _wait_for_silence(directory, holder)
    if holder is not None or not flock:
        try:
            lock = _replace(path)
        except OSError as error:
            if holder is None:  # storage that takes nothing at all is reported by whoever has to write there
                return RunLock()
            problem = f"{path}, left by a run that has vanished, cannot be replaced ({error.strerror})"
            raise ConfigError("run.directory", problem, "Delete it, or choose another run.directory") from None
    _sign(path, lock)
    return RunLock(path, lock)


def _holder_elsewhere(directory: Path, found: str, flock: bool) -> str | None:
    """The holder that flock says nothing about and that may live: what it wrote into the lock file, where the last
    heartbeat is its own, and neither its last one nor from this machine. flock: whether there is flock, which
    decides on this machine.
    """
    beat = last_heartbeat(directory)
    if beat is None or beat.ended or not found.startswith(_name(beat.host, beat.pid)):
        return None
    return None if flock and beat.boot == boot_id() else found


def _wait_for_silence(directory: Path, holder: str) -> None:
    """Raises ConfigError as soon as the holder gives a sign of life; returns when it has given none for long enough."""
    first, end = last_heartbeat(directory), time.monotonic() + VANISHED
    print(f"{directory} was left without a word ({holder}): waiting {VANISHED:g} s for a sign of it", file=sys.stderr)
    while time.monotonic() < end:
        time.sleep(POLL)
        if last_heartbeat(directory) != first:
            raise ConfigError("run.directory", f"{directory} is in use by another run ({holder})", HINT)
    print(f"that run has vanished: {directory} is taken over", file=sys.stderr)


def _replace(path: Path) -> FileLock | None:
    """Put a new file in the place of one whose lock may never end. Should its holder live, it sees that, and ends.

    Raises OSError where the storage takes none.
    """
    new = path.with_name(f"{LOCK}.{os.getpid()}")
    lock: FileLock | None = None
    new.touch()
    with suppress(OSError):
        lock = FileLock(new)
    os.replace(new, path)
    return lock


def _sign(path: Path, lock: FileLock | None) -> None:
    """Write who holds the lock, so that other clients of a file server see it too."""
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    text = f"{_name(socket.gethostname(), os.getpid())} since {since}".encode()
    with suppress(OSError):  # a full disk: the lock holds all the same
        descriptor = os.open(path, os.O_WRONLY) if lock is None else lock.descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)
        os.fsync(descriptor)
        if lock is None:
            os.close(descriptor)


def _name(host: str, pid: int) -> str:
    return f"host {host}, pid {pid},"


def _said(path: Path) -> str:
    """What the holder of the lock wrote about itself, if that is one printable line; "" otherwise."""
    with suppress(OSError), path.open("rb") as file:
        text = file.read(LONGEST).decode(errors="replace")
        if text and text.isprintable():
            return text
    return ""
