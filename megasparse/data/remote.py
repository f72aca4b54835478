"""A folder of shards that is at a URL: each shard is fetched whole into the cache of this machine, and read there."""

import os
import queue
import threading
from contextlib import suppress
from pathlib import Path

from megasparse.callbacks import Progress, silent
from megasparse.data.fetching import fetch_bytes, fetch_file
from megasparse.data.index_file import INDEX_FILE, MOST_BYTES, Shard
from megasparse.data.retrying import ATTEMPTS
from megasparse.data.shard_cache import Fill, ShardCache
from megasparse.data.urls import check_url
from megasparse.errors import UserError


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
