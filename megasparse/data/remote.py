"""Folders of shards at a URL: each shard is fetched whole into a folder of this machine, verified, and read there.

The cache keeps shards for all processes, and for later runs:

    SHA256.tar               a whole shard, named by its content. Who reads it holds a shared lock (flock) on it
    SHA256.BYTES.partial     what came of one of so many bytes. Who fetches it holds an exclusive lock on it
    .lock                    held, for moments, by who makes room or begins to fetch

The kernel ends the locks of a process that dies. So whatever is not locked is not in use: a shard may be deleted to
make room, and a partial be taken over by the next who needs it. The last use of a shard is its time of access.
"""

import errno
import fcntl
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from megasparse.callbacks import Progress, silent
from megasparse.data.files import file_sha256, sync_folder
from megasparse.data.index_file import INDEX_FILE, MOST_BYTES, Shard
from megasparse.data.urls import (
    ATTEMPTS,
    PATIENCE_SECONDS,
    POLL_SECONDS,
    FetchError,
    check_url,
    fetch_bytes,
    fetch_file,
)
from megasparse.errors import ConfigError, DataError, UserError

ENTRY = re.compile(r"\A[0-9a-f]{64}(?:\.(?P<bytes>[0-9]{1,16})\.partial|\.tar)\Z")
GIGABYTE = 10**9


class CachedFile(NamedTuple):
    path: Path
    bytes: int
    """Size in bytes; that of a partial is the one that it will have."""
    used: int
    """Time of the last use, ns."""


class NoRoom(Exception):
    """The limit leaves no room for a shard now. `fetching`: others are being fetched, whose end may change that."""

    def __init__(self, in_use: int, fetching: bool):
        self.in_use, self.fetching = in_use, fetching


class ShardCache:
    """The cache in `folder`, of `limit` bytes. May be used from any thread, and by any number of processes."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, limit: int = 50 * GIGABYTE):
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self.folder = Path(home, "megasparse", "shards") if folder is None else Path(folder)
        self.limit = limit
        self._verified: set[tuple[int, int, int]] = set()  # device, inode and mtime of those whose content was verified

    def path(self, shard: Shard) -> Path:
        """Return the path of a shard once it was fetched."""
        return self.folder / f"{shard.sha256}.tar"

    def open(self, shard: Shard, url: str, progress: Progress) -> int:
        """Return a descriptor of a whole, verified shard, which is safe from deletion until that is closed.

        A shard that is not here is fetched by one process: the others wait.

        Raises:
            ConfigError: the limit has no room for it next to what is in use.
            DataError: the folder is of no use.
            FetchError: it cannot be fetched.
        """
        if shard.bytes > self.limit:
            raise self._too_small(f"{url} alone has {shard.bytes:,} bytes")
        last_size, since = -1, time.monotonic()
        while True:
            with self._errors_named():
                descriptor = self._open_verified(shard, lambda: progress(f"verifying {url}"))
                if descriptor is not None:
                    return descriptor
                try:
                    partial = self._lock_partial(shard, ())
                except NoRoom as full:
                    if not full.fetching:
                        raise self._too_small(f"{full.in_use:,} bytes of it are in use") from None
                    partial = None
            if partial is not None:
                return self._fetch(shard, url, partial, progress, ATTEMPTS)
            size = 0
            with suppress(OSError):
                size = self._partial(shard).stat().st_size
            if size != last_size:
                progress(f"waiting for {url}, which another process fetches")
                last_size, since = size, time.monotonic()
            elif time.monotonic() > since + PATIENCE_SECONDS:
                problem = f"another process has it, or the room for it, and nothing came in {PATIENCE_SECONDS:g} s"
                raise FetchError(url, problem)
            time.sleep(POLL_SECONDS)

    def fetch_ahead(self, shard: Shard, url: str, keep: Collection[Shard], progress: Progress) -> bool:
        """Try once to fetch a shard that will be needed, unless that would cost one of `keep`.

        Returns:
            True if there was room for it.
        """
        with self._errors_named():
            if self.path(shard).exists():
                return True
            try:
                partial = self._lock_partial(shard, {self.path(other).name for other in keep})
            except NoRoom:
                return False
        if partial is not None:
            os.close(self._fetch(shard, url, partial, progress, 1))
        return True

    def _open_verified(self, shard: Shard, tick: Callable[[], None]) -> int | None:
        """Return a descriptor with a shared lock, or None. A cached file with a wrong checksum is deleted."""
        path = self.path(shard)
        descriptor = _open_locked(path, os.O_RDONLY, fcntl.LOCK_SH)
        if descriptor is None:
            return None
        try:
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino, status.st_mtime_ns)
            verified = identity in self._verified or file_sha256(descriptor, tick) == shard.sha256
            if verified and status.st_size == shard.bytes:
                self._verified.add(identity)
                with suppress(PermissionError):  # another user's: its last use is what reading makes of it
                    os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))
                return descriptor
            with self._locked():
                if _is_at(descriptor, path):
                    path.unlink()
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def _lock_partial(self, shard: Shard, keep: Collection[str]) -> int | None:
        """Return a locked partial of the shard, with room for the rest; None if another fetches it, or just did.

        Raises NoRoom.
        """
        partial = self._partial(shard)
        with self._locked():
            if self.path(shard).exists():
                return None
            descriptor = _open_locked(partial, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if descriptor is None:
                return None
            try:
                self._make_room(shard.bytes, partial, keep)
            except BaseException:
                _leave(descriptor, partial)
                raise
        return descriptor

    def _fetch(self, shard: Shard, url: str, descriptor: int, progress: Progress, attempts: int) -> int:
        """Fetch into a locked partial; then it is the shard, and its descriptor holds a shared lock."""
        path, partial = self.path(shard), self._partial(shard)
        try:
            fetch_file(url, shard.bytes, shard.sha256, partial, descriptor, progress, attempts)
            with self._errors_named():
                os.fsync(descriptor)
                with self._locked():  # who makes room must see it under one name or the other
                    os.rename(partial, path)
                sync_folder(self.folder)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                status = os.fstat(descriptor)
            self._verified.add((status.st_dev, status.st_ino, status.st_mtime_ns))
        except BaseException:
            _leave(descriptor, partial)
            raise
        return descriptor

    def _make_room(self, size: int, partial: Path, keep: Collection[str]) -> None:
        """Delete the least recently used files, none of `keep` and none that is locked, until `size` bytes fit next to
        all but `partial`. Raises NoRoom.
        """
        entries = sorted((entry for entry in self._entries() if entry.path != partial), key=lambda entry: entry.used)
        room = self.limit - sum(entry.bytes for entry in entries)
        fetching = False
        for entry in entries:
            if room >= size:
                return
            if entry.path.name in keep:
                continue
            if _delete_unused(entry.path):
                room += entry.bytes
            elif entry.path.suffix == ".partial":
                fetching = True
        if room < size:
            raise NoRoom(self.limit - room, fetching)

    def _entries(self) -> Iterator[CachedFile]:
        with os.scandir(self.folder) as files:
            for file in files:
                if match := ENTRY.match(file.name):
                    try:
                        status = file.stat(follow_symlinks=False)
                    except FileNotFoundError:  # an empty partial, or a damaged shard, that another has just deleted
                        continue
                    size = max(status.st_size, int(match["bytes"] or 0))
                    yield CachedFile(Path(file.path), size, max(status.st_atime_ns, status.st_mtime_ns))

    def _partial(self, shard: Shard) -> Path:
        return self.folder / f"{shard.sha256}.{shard.bytes}.partial"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            no_locks = error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
            problem = f"the cache of shards cannot be used: {error.strerror}" + (" (flock)" if no_locks else "")
            raise DataError(self.folder, problem, "Set data.cache to a folder on a local disk") from None

    def _too_small(self, why: str) -> ConfigError:
        problem = f"{self.limit / GIGABYTE:g} GB are too few for what is needed at once in {self.folder}: {why}"
        return ConfigError("data.cache_gb", problem, "Raise it, or lower data.shuffle_shards")


def _open_locked(path: Path, flags: int, lock: int) -> int | None:
    """Return a locked descriptor of the file at `path`; None if there is none, or another has it locked."""
    while True:
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, lock)
            if _is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # renamed or deleted while we waited for the lock


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _leave(descriptor: int, partial: Path) -> None:
    """Give up a locked partial: others resume it if it has anything."""
    if os.fstat(descriptor).st_size == 0:
        partial.unlink(missing_ok=True)
    os.close(descriptor)


def _delete_unused(path: Path) -> bool:
    """True if nobody had the file locked, and it was deleted."""
    try:
        descriptor = _open_locked(path, os.O_RDWR, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if descriptor is None:
            return not path.exists()
        path.unlink()
        os.close(descriptor)
    except PermissionError:
        return False
    return True


class RemoteFolder(os.PathLike[str]):
    """Folder at a URL, used as a Path is: `/` names a file in it, and messages show its URL."""

    def __init__(self, url: str, cache: ShardCache):
        self.url = check_url(url)
        self.cache = cache

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    def __truediv__(self, file: str) -> str:
        return f"{self.url}/{file}"

    def read_index(self) -> bytes:
        """Return index.json, fetched again each time. Raises FetchError."""
        return fetch_bytes(self / INDEX_FILE, MOST_BYTES, silent)

    def path(self, shard: Shard) -> Path:
        """Return the path of a shard on this machine once it was fetched."""
        return self.cache.path(shard)

    def open(self, shard: Shard, progress: Progress = silent) -> int:
        """Return a descriptor of a whole, verified shard, fetched if needed. Raises what `ShardCache.open` does."""
        return self.cache.open(shard, self / shard.file, progress)


class _Closed(Exception):
    pass


class FetchAhead:
    """A thread that fetches the shards which will be needed next. What fails here is left to who needs the shard."""

    def __init__(self, folder: RemoteFolder):
        self._folder = folder
        self._queue: queue.SimpleQueue[list[Shard]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def want(self, shards: list[Shard]) -> None:
        """Fetch these next, in this order, instead of those of the call before."""
        self._queue.put(shards)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shards", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread, at its next sign of progress."""
        self._closing.set()
        self._queue.put([])

    def _run(self) -> None:
        folder = self._folder
        while not self._closing.is_set():
            shards = self._queue.get()
            for shard in shards:
                with suppress(UserError, _Closed):
                    if self._closing.is_set() or not self._queue.empty():
                        break
                    if not folder.cache.fetch_ahead(shard, folder / shard.file, shards, self._check_closing):
                        break

    def _check_closing(self, doing: str) -> None:
        if self._closing.is_set():
            raise _Closed
