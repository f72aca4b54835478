"""Functions of the operating system that Linux, macOS and Windows do not share."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags of every opened file: closed in started programs, never waiting for a pipe, without translated line ends."""
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_LOCKED_BYTE = 1 << 30  # Windows locks bytes, and a locked byte cannot be read


def lock_file(descriptor: int, shared: bool = False) -> None:
    """Lock an open file until it is closed. Raises BlockingIOError if another process holds the lock. Shared locks do
    nothing on Windows, which never deletes an open file.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif not shared:
        import msvcrt

        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            raise BlockingIOError(errno.EAGAIN, "another process holds the lock") from None
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Sync a folder, so that renames in it survive a crash. Windows cannot open folders."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Read from an offset of a file into a buffer. Return the number of bytes read."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    part = os.read(descriptor, len(buffer))
    buffer[: len(part)] = part
    return len(part)


def write_at(descriptor: int, content: bytes, offset: int) -> int:
    """Write to an offset of a file. Return the number of bytes written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, content, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.write(descriptor, content)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_status(field: str, process: int | str = "self") -> str:
    """Return a field of /proc/PROCESS/status. Raises OSError on other systems than Linux."""
    return Path(f"/proc/{process}/status").read_text().split(f"\n{field}:", 1)[1].split("\n", 1)[0].strip()


def after_fork_in_child(function: Callable[[], None]) -> None:
    """Call a function in every forked child."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
