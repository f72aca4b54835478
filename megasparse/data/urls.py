"""Files at URLs, read by fsspec and repeated if that may help, and folders of shards there.

fsspec is imported when the first URL is used. Each shard is fetched whole into a cache on this machine, verified, and
read there. All processes of the machine, and later runs, share a cache:

    SHA256.tar    a whole shard, named by its content. Readers hold a shared lock (flock) on it
    .lock         held while a process makes room and fetches a shard

The kernel releases the locks of a process that dies.
"""

import fcntl
import hashlib
import importlib
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from megasparse.data.index_file import INDEX_FILE, MOST_BYTES, Shard
from megasparse.data.reader import ShardFile
from megasparse.errors import ConfigError, DataError, UserError, one_line, without_secrets
from megasparse.files import LOCK_FILE, FileLock, Progress, open_file, open_regular, silent

STALL_SECONDS = 30.0  # without data before a connection is considered broken
ATTEMPTS = 8
LONGEST_PAUSE = 30.0  # between two attempts: 1, 2, 4, ... seconds
POLL_SECONDS = 0.1
PIECE, BLOCK = 1 << 20, 8 << 20  # bytes read at once, and bytes of an object requested at once

STORES = {
    "http": ("aiohttp", "'megasparse[remote]'"),
    "https": ("aiohttp", "'megasparse[remote]'"),
    "s3": ("s3fs", "'megasparse[remote]'"),
    "gs": ("gcsfs", "'megasparse[gs]'"),
    "az": ("adlfs", "'megasparse[az]'"),
    "hf": ("huggingface_hub", "huggingface_hub"),
}
"""Schemes of URLs: the module that fsspec needs for them, and its package."""

T = TypeVar("T")


class StoreError(Exception):
    """Failed request to a store. refused: True if repeating it is useless."""

    def __init__(self, reason: str, refused: bool = False):
        super().__init__(one_line(without_secrets(reason)))
        self.refused = refused


class WrongContent(StoreError):
    """The content is not the expected one. It is fetched again once."""


class FetchError(DataError):
    """Failure of all attempts. refused: True if repeating them is useless."""

    def __init__(self, url: str, doing: str, error: StoreError, number: int):
        hint = "Start again when that is repaired"
        if error.refused:
            hint = "Check the URL, and what the credentials here may do; then start again"
        super().__init__(url, f"{doing} failed: {error}, at attempt {number}", hint)
        self.refused = error.refused


def is_url(path: str) -> bool:
    return "://" in path


def check_url(url: str, schemes: Collection[str] = STORES) -> str:
    """Return the URL of a folder without a slash at its end. Raises DataError, without a password, if it is invalid."""
    try:
        parts = urlsplit(url)
    except ValueError:  # an address in brackets that is none
        parts = urlsplit(f"{url.partition('://')[0]}://")
    is_valid = parts.scheme in schemes and (parts.hostname or parts.scheme == "file")
    rest = re.sub(r"\A(hf://[^:@]+)@[0-9a-f]{40}(?=/|\Z)", r"\1", url)  # without the revision of a repository
    if not is_valid or not re.fullmatch(r"[!-~]+", rest) or re.search("[@?#]", rest):
        name = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
        problem = "this is not a URL that is read here: those have no user, password, query or space"
        raise DataError(name, problem, f"Known here: {', '.join(schemes)}. Credentials come from the environment")
    return url.rstrip("/")


@cache
def store(scheme: str) -> Any:
    """Return fsspec's file system for a scheme, with the credentials of the environment or of the store's own files.
    Raises DataError if its library is missing.
    """
    module, package = STORES.get(scheme, ("fsspec", "'megasparse[remote]'"))
    try:
        import fsspec

        library = importlib.import_module(module)
    except ImportError:
        raise DataError(f"{scheme}://", f"{module} is not installed", f"Run: pip install {package}") from None
    if scheme in ("http", "https"):
        timeout = library.ClientTimeout(total=None, sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
        client = {"timeout": timeout, "trust_env": True}
        return fsspec.filesystem(scheme, client_kwargs=client, skip_instance_cache=True)
    if scheme == "s3":
        timeouts = {"connect_timeout": STALL_SECONDS, "read_timeout": STALL_SECONDS}
        return fsspec.filesystem(scheme, config_kwargs=timeouts, use_listings_cache=False)
    return fsspec.filesystem(scheme, **({"auto_mkdir": True} if scheme == "file" else {}))


def store_answer(call: Callable[[], T]) -> T:
    """Return the answer of a store. Exceptions of its libraries become StoreError, without passwords and queries."""
    try:
        return call()
    except StoreError:
        raise
    except Exception as error:
        kind, status = type(error).__name__, getattr(error, "status", 0)  # of aiohttp's errors
        status = status if isinstance(status, int) else 0
        reason = f"{status} {getattr(error, 'message', '')}" if status else str(error) or kind
        if "credentials" in kind.lower():
            raise StoreError(f"the store wants credentials, in the environment or its files ({reason})", True) from None
        if isinstance(error, FileNotFoundError):
            raise StoreError("it does not exist", True) from None
        refused = isinstance(error, PermissionError) or (300 <= status < 500 and status not in (408, 425, 429))
        raise StoreError(f"the store answers: {reason}" if refused else reason, refused) from None


def open_url(url: str) -> Any:
    """Open the file at a URL; `read` may return fewer bytes than asked for. Raises StoreError."""
    scheme = urlsplit(url).scheme
    system = store(scheme)
    if scheme not in ("http", "https"):
        return store_answer(lambda: system.open(url, "rb", block_size=BLOCK, cache_type="readahead"))
    # A block size of 0 streams one GET; without a size fsspec would send a HEAD first
    file = store_answer(lambda: system.open(url, "rb", block_size=0, size=1, headers={"Accept-Encoding": "identity"}))
    if scheme == "https" and any(answer.url.scheme != "https" for answer in (*file.r.history, file.r)):
        file.close()
        raise StoreError("it redirects from https to http", True)
    return file


def fetch(url: str, out: IO[bytes], progress: Progress, size: int, sha256: str = "", attempts: int = ATTEMPTS) -> None:
    """Replace the content of `out` by a URL's, of `size` bytes (at most, if sha256 is empty).

    Raises FetchError; OSError if `out` cannot be written.
    """

    def attempt() -> None:
        out.seek(0)
        out.truncate()
        digest = hashlib.sha256()
        with closing(open_url(url)) as file:
            while piece := store_answer(lambda: bytes(file.read(PIECE))):
                if out.tell() + len(piece) > size:
                    raise (WrongContent if sha256 else StoreError)(f"it has more than {size:,} bytes", not sha256)
                digest.update(piece)
                out.write(piece)
                progress(f"fetching {url}, {out.tell():,} bytes so far")
        if sha256 and digest.hexdigest() != sha256:
            problem = f"its {out.tell():,} bytes have sha256 {digest.hexdigest()[:12]}…"
            raise WrongContent(f"{problem}, but {size:,} bytes with {sha256[:12]}… are expected")

    retried("fetching", url, attempt, progress, attempts)


def retried(doing: str, url: str, attempt: Callable[[], T], progress: Progress, attempts: int = ATTEMPTS) -> T:
    """Return the result of `attempt`, repeated after a StoreError if that may help. Raises FetchError."""
    number = wrong = 0
    while True:
        number += 1
        try:
            return attempt()
        except StoreError as error:
            wrong += isinstance(error, WrongContent)
            if error.refused or wrong == 2 or number == attempts:
                raise FetchError(url, doing, error, number) from None
            pause = min(LONGEST_PAUSE, 2.0 ** (number - 1))
            message = f"{doing} {url}: attempt {number} of {attempts} failed ({error}); again in {pause:g} s"
            print(message, file=sys.stderr, flush=True)
        until = time.monotonic() + pause
        while (remaining := until - time.monotonic()) > 0:
            progress(f"waiting before {doing} {url} again")
            time.sleep(min(POLL_SECONDS, remaining))


# Folders of shards

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
            ConfigError: the limit is too small for it and the files in use.
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
                    # Not buffered: its size tells others of progress
                    with open(partial, "xb", buffering=0, opener=open_regular) as file:
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
                    path.unlink()  # of a process that has ended, as this one holds the lock
                elif ENTRY.fullmatch(path.name):
                    entries.append((max(status.st_atime_ns, status.st_mtime_ns), path, status.st_size))
                    room -= status.st_size
        for _, path, freed in sorted(entries):
            if room < size and path not in keep:
                with suppress(BlockingIOError, FileNotFoundError, PermissionError), open_file(path, "r+b") as file:
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
        while True:
            with suppress(BlockingIOError):
                lock = FileLock(self.folder / LOCK_FILE)
                break
            size = 0
            with suppress(FileNotFoundError):
                size = sum(path.stat().st_size for path in self.folder.glob("*.partial"))
            if size != reported:  # report progress only if data arrives
                reported = size
                progress(doing)
            time.sleep(POLL_SECONDS)
        with lock:
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
    """A thread that fetches the next shards. It ignores failures: the reader of the shard fetches it again."""

    def __init__(self, folder: RemoteFolder):
        self._folder, self._closing = folder, threading.Event()
        self._queue: queue.SimpleQueue[list[Shard]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="shards", daemon=True).start()

    def want(self, shards: list[Shard]) -> None:
        """Fetch these next, in this order, instead of the ones requested before."""
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
