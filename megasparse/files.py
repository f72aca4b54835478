"""Files: opened only if regular, replaced atomically, locked, and identified by content.

A reader of a named pipe would block forever, and a writer would follow a planted link to another file. Open paths from
outside the package with `open_file`, `read_file`, `write_file` and `FileLock`.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from megasparse.errors import DataError
from megasparse.system import NO_LINKS, OPEN_FLAGS, after_fork_in_child, lock_file, sync_folder, write_at

Progress = Callable[[str], None]
"""Called with a description of the current work whenever it advances."""


def silent(doing: str) -> None:
    """Ignore progress; a `Progress`."""


UNSCORED = 1 << 24
"""Mark of a token that is not predicted, added to its id in shards of conversations. Ids are below it."""
CONVERSATION_END = 2 * UNSCORED
"""Mark of the token between two conversations, which is not predicted either."""
LARGEST = 1 << 28
"""Default limit of `read_file` in bytes."""
NOT_REGULAR = "this is not a regular file"
HARD_LINK = "this file has a second name (a hard link), which is not written through: replace it by a copy"
REASONS = {errno.ELOOP: "this is a symbolic link, which is not written through", errno.ENXIO: NOT_REGULAR}


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file; usable as the `opener` of `open`. Links are not written through.

    Raises OSError without blocking, also for a named pipe, a device and a folder.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    flags |= OPEN_FLAGS | (NO_LINKS if writes else 0)
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        raise OSError(error.errno, REASONS.get(error.errno or 0, error.strerror), os.fspath(path)) from None
    status = os.fstat(descriptor)
    is_regular = stat.S_ISREG(status.st_mode)
    if not is_regular or (writes and status.st_nlink > 1):
        os.close(descriptor)
        raise OSError(errno.EINVAL, HARD_LINK if is_regular else NOT_REGULAR, os.fspath(path))
    return descriptor


def open_file(path: str | os.PathLike[str], mode: str = "rb") -> IO[bytes]:
    """Open a regular file in a binary mode of `open`. Raises OSError like `open_regular`."""
    return open(path, mode, opener=open_regular)


def read_file(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """Return the content of a regular file. Raises OSError, also for files of more than `most` bytes."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"{size:,} bytes are more than the limit of {most:,}", os.fspath(path))
        return file.read(size)


MOST_KEYS = 1 << 16  # pydantic collects an error for each unknown key


def strict_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError also for repeated keys, NaN, infinities, and more than
    MOST_KEYS keys.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > MOST_KEYS:
            raise ValueError(f"an object has {len(pairs):,} keys, at most {MOST_KEYS:,} are read")
        values = dict(pairs)
        if len(values) < len(pairs):
            repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise ValueError(f'the key "{repeated[:60]}" is given twice')
        return values

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def syntax_hint(text: str, position: int) -> str:
    """Return what to do about a syntax error of JSON at a position, "" if that is not clear."""
    after = text[position:].lstrip()
    if (re.match(r"[}\]]", after) and text[:position].rstrip().endswith(",")) or re.match(r",\s*[}\]]", after):
        return "Remove the comma before the closing bracket"
    if after.startswith(("//", "#", "/*")):
        return "Remove the comment: JSON does not allow comments"
    if after.startswith("'"):
        return "Write texts and keys in double quotes"
    return "" if after else "The text ends too early: close the brackets and quotes"


def json_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object in a text; an empty one if it is damaged or another value."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        return value if isinstance(value, dict) else {}
    return {}


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces `path` when the block ends and is deleted if the block fails.

    It is synced before it is renamed: after a crash, `path` is either the old or the complete new file.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with open_file(partial, "x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file atomically; text is encoded as UTF-8."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


PARTIAL = ".partial"
"""Suffix of a file's name while it is written."""


class FileLock:
    """An exclusive lock (flock) on the file at `path` until `release`, or until this process ends.

    The kernel keeps such a lock while any process has the file open, and a forked child inherits open files. Children
    therefore close it: after os.fork (as in multiprocessing) immediately, others when they start a program.

    Raises BlockingIOError if another process holds the lock, and OSError if the file system does not support locks.
    """

    def __init__(self, path: Path):
        self.descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            lock_file(self.descriptor)
        except OSError:
            os.close(self.descriptor)
            raise
        _held.add(self)

    def release(self) -> None:
        """Release the lock; a second call, or a call in a forked child, does nothing."""
        if self in _held:
            _held.remove(self)
            os.close(self.descriptor)

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


LOCK_FILE = ".lock"
"""Name of the lock file in a folder."""


@contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """Create a folder if necessary, and lock it until the block ends.

    Raises DataError if another process holds the lock, and if writing fails. doing: activity of that process.
    """
    problem, hint = f"another process is {doing} here", "Wait until it has finished"
    with DataError.instead_of(OSError, folder, "cannot be written: {}", "Run the command again"):
        folder.mkdir(parents=True, exist_ok=True)
        with DataError.instead_of(BlockingIOError, folder, problem, hint):
            lock = FileLock(folder / LOCK_FILE)
        with lock:
            yield


_held: set[FileLock] = set()


def _close_in_child() -> None:
    for lock in list(_held):
        lock.release()


after_fork_in_child(_close_in_child)


class JsonLines:
    """File of JSON lines. If the storage fails, lines wait in memory, in order, until it works again.

    report: called once when the storage fails, and once when it works again. last_step: lines of later steps are
    removed first; None removes only an incomplete last line.
    """

    def __init__(self, path: Path, report: Callable[[str], None], last_step: int | None = None):
        self.path, self._report, self._last_step = path, report, last_step
        self._length: int | None = None  # bytes of complete lines; None before the file was truncated
        self._waiting, self._failing = b"", False
        self.append()

    def append(self, *lines: dict[str, Any]) -> None:
        """Append lines, now or when the storage works again."""
        self._waiting += b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        try:
            self._write()
        except OSError as error:
            if not self._failing:
                free = "free space unknown"
                with suppress(OSError):
                    free = f"{shutil.disk_usage(self.path.parent).free:,} bytes are free"
                problem, waiting = error.strerror or str(error), "its lines stay in memory until they can be written"
                self._report(f"{self.path} cannot be written ({problem}; {free}): {waiting}")
            self._failing = True
            return
        if self._failing:
            self._report(f"{self.path} can be written again: no line is missing")
        self._failing = False

    def close(self) -> None:
        """Write the waiting lines, and report those that could not be written."""
        self.append()
        if lost := self._waiting.count(b"\n"):
            self._report(f"{self.path}: its last {lost} lines could not be written and are lost")

    def _write(self) -> None:
        if self._length is None:
            cut_lines(self.path, self._last_step)
        written = 0
        # Created only once: later the path could be on another file system, if a folder was unmounted meanwhile.
        descriptor = open_regular(self.path, os.O_WRONLY | (os.O_CREAT if self._length is None else 0))
        try:
            size = os.fstat(descriptor).st_size
            self._length = size if self._length is None else self._length
            if size < self._length:
                raise OSError(errno.ESTALE, "the file is shorter than its written lines", str(self.path))
            os.ftruncate(descriptor, self._length)  # drops the rest of a failed write
            while written < len(self._waiting):
                written += write_at(descriptor, self._waiting[written:], self._length + written)
        except OSError:
            with suppress(OSError):  # or when it works again
                os.ftruncate(descriptor, self._length or 0)
            raise
        finally:
            with suppress(OSError):
                os.close(descriptor)
        self._length, self._waiting = self._length + written, b""


def cut_lines(path: Path, last_step: int | None) -> None:
    """Atomically remove an incomplete last line and the lines of steps after `last_step`."""

    def valid(line: bytes) -> bool:
        try:
            return line.endswith(b"\n") and (last_step is None or json.loads(line)["step"] <= last_step)
        except (ValueError, KeyError, TypeError, RecursionError):
            return False

    if path.exists():
        with open_file(path) as file:
            lines = file.readlines()
        if not all(map(valid, lines)):
            with replacing(path) as out:
                out.writelines(filter(valid, lines))


def read_line(path: Path, step: int) -> tuple[int, dict[str, Any]]:
    """Return the last step with a complete line (0 if there is none), and the line of `step` ({} if there is none)."""
    last = match = b""
    with suppress(FileNotFoundError), open_file(path) as file:
        while (line := file.readline(1 << 24)).endswith(b"\n"):
            last = line
            if line.startswith(b'{"step": %d,' % step):
                match = line
    last_step = json_object(last).get("step")
    return last_step if isinstance(last_step, int) else 0, json_object(match)


def file_sha256(file: str | os.PathLike[str] | int, progress: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 of a regular file, a path or an open descriptor. `progress` is called every MiB."""
    digest = hashlib.sha256()
    with open(file, "rb", closefd=False) if isinstance(file, int) else open_file(file) as stream:
        stream.seek(0)
        while piece := stream.read(1 << 20):
            digest.update(piece)
            progress()
    return digest.hexdigest()


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which batch_2 precedes batch_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]
