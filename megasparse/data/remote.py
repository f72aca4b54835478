"""Folders of shards at a URL: each shard is fetched whole into a cache on this machine, verified, and read there.

All processes of the machine, and later runs, share a cache:

    SHA256.tar    a whole shard, named by its content. Readers hold a shared lock (flock) on it
    .lock         held while a process makes room and fetches a shard

The kernel releases the locks of a process that dies.
"""

import fcntl
import os
import queue
import re
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path

from megasparse.callbacks import Progress, silent
from megasparse.data.index_file import INDEX_FILE, MOST_BYTES, Shard
from megasparse.data.reader import ShardFile
from megasparse.data.urls import ATTEMPTS, POLL_SECONDS, check_url, fetch
from megasparse.errors import ConfigError, DataError, UserError

ENTRY = re.compile(r"[0-9a-f]{64}\.(tar|([0-9]+\.)?partial)")
GIGABYTE = 10**9


class ShardCache:
    """The cache in `folder`, of `limit` bytes. May be used from any thread, and by any number of processes."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, limit: int = 50 * GIGABYTE):
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self.folder = Path(home, "megasparse", "shards") if folder is None else Path(folder)
        self.limit = limit

    def path(self, shard: Shard) -> Path:
        """Return the path of a shard once it was fetched."""
        return self.folder / f"{shard.sha256}.tar"

    def open(self, shard: Shard, url: str, sample_bytes: int, progress: Progress = silent) -> ShardFile:
        """Return a whole, verified shard, fetched if needed. It is safe from deletion until it is closed.

        Raises:
            ConfigError: the limit has no room for it next to the files in use.
            DataError: it cannot be fetched, or the folder cannot be used.
        """
        path = self.path(shard)
        for is_last in (False, False, True):
            self.fetch(shard, url, progress)
            try:
                file = ShardFile(path, shard, sample_bytes)
                fcntl.flock(file.descriptor, fcntl.LOCK_SH)
                with suppress(OSError):  # another user's: its last use is its time of access
                    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
                break
            except DataError:  # a damaged copy, or another process has just made room
                if is_last:
                    raise
                with suppress(OSError):
                    path.unlink()
        return file

    def fetch(
        self, shard: Shard, url: str, progress: Progress, keep: Collection[Shard] = (), attempts: int = ATTEMPTS
    ) -> None:
        """Fetch a shard unless it is here; other processes wait. keep: not to be deleted for it. Raises as `open`."""
        path, partial = self.path(shard), self.folder / f"{shard.sha256}.partial"
        try:
            if path.exists():
                return
            with self._lock(f"waiting for {url}, as another process is fetching", progress):
                if path.exists():
                    return
                self._make_room(shard.bytes, url, {self.path(other) for other in keep})
                try:
                    with partial.open("xb", buffering=0) as file:  # its size tells others of progress
                        fetch(url, file, progress, shard.bytes, shard.sha256, attempts)
                    partial.rename(path)
                finally:
                    partial.unlink(missing_ok=True)
        except OSError as error:
            problem = f"the cache of shards cannot be used: {error.strerror}"
            raise DataError(self.folder, problem, "Make room there, or set data.cache to another local disk") from None

    def _make_room(self, size: int, url: str, keep: Collection[Path]) -> None:
        """Delete the least recently used shards, none of `keep` and none in use, until `size` bytes fit."""
        room, entries = self.limit, []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # a damaged one, which its reader has just deleted
                status = path.stat(follow_symlinks=False)
                if path.suffix == ".partial" and ENTRY.fullmatch(path.name):
                    path.unlink()  # of a process that has ended: this one has the lock
                elif ENTRY.fullmatch(path.name):
                    entries.append((max(status.st_atime_ns, status.st_mtime_ns), path, status.st_size))
                    room -= status.st_size
        for _, path, freed in sorted(entries):
            if room < size and path not in keep:
                with suppress(BlockingIOError, FileNotFoundError, PermissionError), path.open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    room += freed
        if room < size:
            need = f"{url} has {size:,} bytes, and {self.limit - room:,} bytes of it are in use"
            problem = f"{self.limit / GIGABYTE:g} GB are too few for what is needed at once in {self.folder}: {need}"
            raise ConfigError("data.cache_gb", problem, "Raise it, or lower data.shuffle_shards")

    @contextmanager
    def _lock(self, doing: str, progress: Progress) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        reported = -1
        with open(self.folder / ".lock", "ab") as file:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                size = 0
                with suppress(FileNotFoundError):
                    size = sum(path.stat().st_size for path in self.folder.glob("*.partial"))
                if size != reported:  # a wait in which nothing comes is no progress
                    reported = size
                    progress(doing)
                time.sleep(POLL_SECONDS)
            yield


class RemoteFolder(os.PathLike[str]):
    """Folder at a URL, used as a Path is: `/` names a file in it, and messages show its URL."""

    def __init__(self, url: str, cache: ShardCache):
        self.url, self.cache = check_url(url), cache

    def __str__(self) -> str:
        return self.url

    __fspath__ = __str__

    def __truediv__(self, file: str) -> str:
        return f"{self.url}/{file}"

    def read_index(self) -> bytes:
        """Return index.json, fetched again each time. Raises FetchError."""
        content = BytesIO()
        fetch(self / INDEX_FILE, content, silent, MOST_BYTES)
        return content.getvalue()


class _Closed(Exception):
    pass


class FetchAhead:
    """A thread that fetches the shards which will be needed next. Its failures are left to who needs the shard."""

    def __init__(self, folder: RemoteFolder):
        self._folder, self._closing = folder, threading.Event()
        self._queue: queue.SimpleQueue[list[Shard]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="shards", daemon=True).start()

    def want(self, shards: list[Shard]) -> None:
        """Fetch these next, in this order, instead of those of the call before."""
        self._queue.put(shards)

    def close(self) -> None:
        """End the thread, at its next sign of progress."""
        self._closing.set()
        self._queue.put([])

    def _run(self) -> None:
        while not self._closing.is_set():
            shards = self._queue.get()
            for shard in shards:
                with suppress(UserError, _Closed):
                    if self._queue.empty():
                        url = self._folder / shard.file
                        self._folder.cache.fetch(shard, url, self._check_closing, shards, attempts=1)

    def _check_closing(self, doing: str) -> None:
        if self._closing.is_set():
            raise _Closed
