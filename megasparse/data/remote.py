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

Fill = Callable[[Path, int], None]
"""Fetches a shard into the file of this path and descriptor, or raises."""


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
        """The path of a shard once it was fetched."""
        return self.folder / f"{shard.sha256}.tar"

    def open(self, shard: Shard, url: str, fill: Fill, progress: Progress) -> int:
        """A descriptor of a whole, verified shard, which is safe from deletion until that is closed.

        Where it is not here it is fetched, by one process: the others wait. Raises ConfigError where the limit has no
        room for it beside what is in use; DataError where the folder is of no use; FetchError as `fill` does.
        """
        if shard.bytes > self.limit:
            raise self._too_small(f"{url} alone has {shard.bytes:,} bytes")
        watched, since = -1, time.monotonic()
        while True:
            with self._errors_named():
                found = self._open_verified(shard, lambda: progress(f"verifying {url}"))
                if found is not None:
                    return found
                try:
                    partial = self._begin(shard, ())
                except NoRoom as full:
                    if not full.fetching:
                        raise self._too_small(f"{full.in_use:,} bytes of it are in use") from None
                    partial = None
            if partial is not None:
                return self._fill(shard, partial, fill)
            grown = self._size_of_partial(shard)
            if grown != watched:
                progress(f"waiting for {url}, which another process fetches")
                watched, since = grown, time.monotonic()
            elif time.monotonic() > since + PATIENCE_SECONDS:
                raise FetchError(
                    url, f"another process has it, or the room for it, and nothing came in {PATIENCE_SECONDS:g} s"
                )
            time.sleep(POLL_SECONDS)

    def fetch_ahead(self, shard: Shard, fill: Fill, keep: Collection[Shard]) -> bool:
        """Fetch a shard that will be needed, unless it is here, is being fetched, or would cost one of `keep`.

        Whether there was room. Raises what `fill` does.
        """
        with self._errors_named():
            if self.path(shard).exists():
                return True
            try:
                partial = self._begin(shard, {self.path(other).name for other in keep})
            except NoRoom:
                return False
        if partial is not None:
            os.close(self._fill(shard, partial, fill))
        return True

    def _open_verified(self, shard: Shard, tick: Callable[[], None]) -> int | None:
        """A descriptor with a shared lock, or None. What is here and not what it should be is deleted."""
        path = self.path(shard)
        descriptor = _open_locked(path, os.O_RDONLY, fcntl.LOCK_SH)
        if descriptor is None:
            return None
        try:
            status = os.fstat(descriptor)
            known = (status.st_dev, status.st_ino, status.st_mtime_ns)
            if status.st_size == shard.bytes and (
                known in self._verified or file_sha256(descriptor, tick) == shard.sha256
            ):
                self._verified.add(known)
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

    def _begin(self, shard: Shard, keep: Collection[str]) -> int | None:
        """A partial of the shard, locked, with room for the rest; None where another fetches it, or just did.

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

    def _fill(self, shard: Shard, descriptor: int, fill: Fill) -> int:
        """Fetch into a locked partial; then it is the shard, and its descriptor holds a shared lock."""
        path, partial = self.path(shard), self._partial(shard)
        try:
            fill(partial, descriptor)
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

    def _make_room(self, wanted: int, own: Path, keep: Collection[str]) -> None:
        """Delete what was not used for longest, none of `keep` and nothing that is locked, until `wanted` bytes fit
        beside all but `own`. Raises NoRoom.
        """
        entries = sorted((e for e in self._entries() if e.path != own), key=lambda entry: entry.used)
        room = self.limit - sum(entry.bytes for entry in entries)
        fetching = False
        for entry in entries:
            if room >= wanted:
                return
            if entry.path.name in keep:
                continue
            if _delete_unused(entry.path):
                room += entry.bytes
            elif entry.path.suffix == ".partial":
                fetching = True
        if room < wanted:
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

    def _size_of_partial(self, shard: Shard) -> int:
        try:
            return self._partial(shard).stat().st_size
        except OSError:
            return 0

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
    """A descriptor of the file that is at `path`, locked; None where there is none, or another has it locked."""
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
    """Give a locked partial up: for others to go on with, where it has anything."""
    if os.fstat(descriptor).st_size == 0:
        partial.unlink(missing_ok=True)
    os.close(descriptor)


def _delete_unused(path: Path) -> bool:
    """Whether nobody had the file locked, and it was deleted."""
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
        """Return index.json, fetched anew each time: it says what is trained on. Raises FetchError."""
        return fetch_bytes(self / INDEX_FILE, MOST_BYTES, silent)

    def path(self, shard: Shard) -> Path:
        """The path of a shard on this machine once it was fetched."""
        return self.cache.path(shard)

    def open(self, shard: Shard, progress: Progress = silent) -> int:
        """A descriptor of a whole, verified shard, fetched where it is not here. Raises what `ShardCache.open` does."""
        return self.cache.open(shard, self / shard.file, self._fill(shard, progress, ATTEMPTS), progress)

    def fetch_ahead(self, shard: Shard, keep: list[Shard], progress: Progress) -> bool:
        """Try once to have a shard here before it is needed; whether the cache had room for it beside `keep`."""
        return self.cache.fetch_ahead(shard, self._fill(shard, progress, 1), keep)

    def _fill(self, shard: Shard, progress: Progress, attempts: int) -> Fill:
        url = self / shard.file
        return lambda path, descriptor: fetch_file(url, shard.bytes, shard.sha256, path, descriptor, progress, attempts)


class _Closed(Exception):
    pass


class FetchAhead:
    """A thread that fetches the shards which will be needed next. What fails here is left to who needs the shard."""

    def __init__(self, folder: RemoteFolder):
        self._folder = folder
        self._wanted: queue.SimpleQueue[list[Shard]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def want(self, shards: list[Shard]) -> None:
        """These are needed next, in this order: in place of those wanted before."""
        self._wanted.put(shards)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shards", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread, at its next sign of progress."""
        self._closing.set()
        self._wanted.put([])

    def _run(self) -> None:
        while not self._closing.is_set():
            shards = self._wanted.get()
            for shard in shards:
                with suppress(UserError, _Closed):
                    if self._closing.is_set() or not self._wanted.empty():
                        break
                    if not self._folder.fetch_ahead(shard, shards, self._check_closing):
                        break

    def _check_closing(self, doing: str) -> None:
        if self._closing.is_set():
            raise _Closed
