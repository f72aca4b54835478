"""A lock on a file, held by one process and released by the kernel when that process ends, however it ends."""

import fcntl
import os
from pathlib import Path


class FileLock:
    """Locks the file at `path` (flock, exclusive) until `release`, or until this process ends.

    The kernel keeps such a lock while any process has the open file, and a forked child inherits open files. Children
    therefore close theirs: those made by os.fork (multiprocessing too) at once, others when they start a program.

    flags: for os.open, beside those of reading and writing.

    Raises BlockingIOError where another holds the lock, and OSError where the file cannot be opened or its file system
    has no locks.
    """

    def __init__(self, path: Path, flags: int = 0):
        self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o644)
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
