"""Files at URLs, read by fsspec with failed requests repeated, and folders of shards there.

Each shard is fetched whole into a cache on this machine, which its processes and later runs share, and verified.
`SHA256.tar` is a shard, on which readers hold a shared lock (flock); `.lock` is held while a process makes room and
fetches a shard.
"""

import hashlib
import importlib
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from megasparse.data.index_file import Shard
from megasparse.data.shard_file import ShardFile
from megasparse.errors import ConfigError, DataError, FileError, UserError, one_line, without_secrets
from megasparse.files import LOCK_FILE, PARTIAL, FileLock, Progress, open_file, replacing, silent
from megasparse.system import lock_file

STALL_SECONDS = 30.0  # without data before a connection is considered broken
ATTEMPTS = 8
LONGEST_PAUSE = 30.0  # between two attempts: 1, 2, 4, ... seconds
POLL_SECONDS = 0.1
PIECE, BLOCK = 1 << 20, 8 << 20  # bytes read at once, and bytes of an object requested at once
GIGABYTE = 10**9
REMOTE = "-e '.[remote]'"
STORES = {
    "http": ("aiohttp", REMOTE), "https": ("aiohttp", REMOTE), "s3": ("s3fs", REMOTE),
    "gs": ("gcsfs", "-e '.[gs]'"), "az": ("adlfs", "-e '.[az]'"),
    "hf": ("huggingface_hub", "huggingface_hub"),
}  # fmt: skip
"""Schemes of URLs: the module that fsspec needs for them, and its package."""

T = TypeVar("T")


class StoreError(Exception):
    """Failed request to a store. refused: True if repeating it is useless."""

    def __init__(self, reason: str, refused: bool = False):
        super().__init__(one_line(without_secrets(reason)))
        self.refused = refused


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
    """Return fsspec's file system for a scheme, with credentials of the environment. Raises DataError if its library is
    missing.
    """
    module, package = STORES.get(scheme, ("fsspec", REMOTE))
    missing = f"{module} is not installed"
    with DataError.instead_of(ImportError, f"{scheme}://", missing, f"Run: pip install {package}"):
        import fsspec

        library = importlib.import_module(module)
    options: dict[str, Any] = {"auto_mkdir": True} if scheme == "file" else {}
    if scheme in ("http", "https"):
        timeout = library.ClientTimeout(total=None, sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
        options = {"client_kwargs": {"timeout": timeout, "trust_env": True}, "skip_instance_cache": True}
    elif scheme == "s3":
        timeouts = {"connect_timeout": STALL_SECONDS, "read_timeout": STALL_SECONDS}
        options = {"config_kwargs": timeouts, "use_listings_cache": False}
    return fsspec.filesystem(scheme, **options)


def store_answer(call: Callable[[], T], *absent: T) -> T:
    """Return the answer of a store, or `absent` for a file that does not exist. Exceptions of its libraries become
    StoreError, without passwords and queries.
    """
    try:
        return call()
    except (StoreError, UserError):
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError):
            if absent:
                return absent[0]
            raise StoreError("it does not exist", True) from None
        kind, status = type(error).__name__, getattr(error, "status", 0)  # of aiohttp's errors
        status = status if isinstance(status, int) else 0
        reason = f"{status} {getattr(error, 'message', '')}" if status else str(error) or kind
        if "credentials" in kind.lower():
            raise StoreError(f"the store wants credentials, in the environment or its files ({reason})", True) from None
        refused = isinstance(error, PermissionError) or (300 <= status < 500 and status not in (408, 425, 429))
        raise StoreError(f"the store answers: {reason}" if refused else reason, refused) from None


def open_url(url: str) -> Any:
    """Open the file at a URL; `read` may return fewer bytes than asked for. Raises StoreError."""
    scheme = urlsplit(url).scheme
    options: dict[str, Any] = {"block_size": BLOCK, "cache_type": "readahead"}
    if scheme in ("http", "https"):  # without a block size, one GET; without a size fsspec would send a HEAD first
        options = {"block_size": 0, "size": 1, "headers": {"Accept-Encoding": "identity"}}
    file = store_answer(lambda: store(scheme).open(url, "rb", **options))
    if scheme == "https" and any(answer.url.scheme != "https" for answer in (*file.r.history, file.r)):
        file.close()
        raise StoreError("it redirects from https to http", True)
    return file


@dataclass(frozen=True)
class Requests:
    """Requests to stores, repeated after a StoreError that may pass.

    progress: called as they advance. errors: raised if all attempts fail, and if a store refuses a request.
    """

    progress: Progress = silent
    attempts: int = ATTEMPTS
    errors: tuple[type[FileError], type[FileError]] = (DataError, DataError)

    def send(self, doing: str, url: str, request: Callable[[], T]) -> T:
        """Return the result of `request`. Raises one of `errors`."""
        number = 1
        while True:
            try:
                return request()
            except StoreError as error:
                if error.refused or number == self.attempts:
                    check = "Check the URL and the permissions of the credentials; then start again"
                    hint = check if error.refused else "Start again when that is repaired"
                    problem = f"{doing} failed: {error}, at attempt {number}"
                    raise self.errors[error.refused](url, problem, hint) from None
                pause = min(LONGEST_PAUSE, 2.0 ** (number - 1))
                message = f"{doing} {url}: attempt {number} of {self.attempts} failed ({error}); again in {pause:g} s"
                print(message, file=sys.stderr, flush=True)
            until, number = time.monotonic() + pause, number + 1
            while (remaining := until - time.monotonic()) > 0:
                self.progress(f"waiting before {doing} {url} again")
                time.sleep(min(POLL_SECONDS, remaining))

    def fetch(self, url: str, out: IO[bytes], size: int, sha256: str = "") -> None:
        """Replace the content of `out` by a URL's, of `size` bytes (at most, if sha256 is empty).

        Unexpected content is fetched again once. Raises one of `errors`; OSError if `out` cannot be written.
        """
        wrong = count()

        def attempt() -> None:
            out.seek(0)
            out.truncate()
            digest = hashlib.sha256()
            with closing(open_url(url)) as file:
                while piece := store_answer(lambda: bytes(file.read(PIECE))):
                    if out.tell() + len(piece) > size:
                        raise StoreError(f"it has more than {size:,} bytes", not sha256 or next(wrong) > 0)
                    digest.update(piece)
                    out.write(piece)
                    out.flush()  # processes that wait for a shard watch its size
                    self.progress(f"fetching {url}, {out.tell():,} bytes so far")
            if sha256 and digest.hexdigest() != sha256:
                problem = f"its {out.tell():,} bytes have sha256 {digest.hexdigest()[:12]}…"
                expected = f"{size:,} bytes with {sha256[:12]}… are expected"
                raise StoreError(f"{problem}, but {expected}", next(wrong) > 0)

        self.send("fetching", url, attempt)


# Folders of shards


class ShardCache:
    """The cache in `folder`, of `limit` bytes. May be used from any thread, and by any number of processes."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, limit: int = 50 * GIGABYTE):
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self.folder, self.limit = Path(folder or f"{home}/megasparse/shards"), limit

    def path(self, shard: Shard) -> Path:
        """Return the path of a shard once it was fetched."""
        return self.folder / f"{shard.sha256}.tar"

    def open(self, shard: Shard, url: str, sample_bytes: int, progress: Progress = silent) -> ShardFile:
        """Return a whole, verified shard, fetched if needed. It is safe from deletion until it is closed.

        Raises ConfigError if the limit is too small for it and the files in use, and DataError if it cannot be fetched.
        """
        for is_last in (False, False, True):
            self.fetch(shard, url, Requests(progress))
            try:
                file = ShardFile(self.path(shard), shard, sample_bytes)
                break
            except DataError:  # a damaged copy, or another process has just made room
                if is_last:
                    raise
                with suppress(OSError):
                    self.path(shard).unlink()
        lock_file(file.descriptor, shared=True)
        with suppress(OSError):  # another user's: its last use is its time of access
            os.utime(file.descriptor, ns=(time.time_ns(), os.fstat(file.descriptor).st_mtime_ns))
        return file

    def fetch(self, shard: Shard, url: str, requests: Requests, keep: Collection[Shard] = ()) -> None:
        """Fetch a shard unless it is here; other processes wait. keep: not to be deleted for it. Raises as `open`."""
        path = self.path(shard)
        try:
            if path.exists():
                return
            with self._lock(f"waiting for {url}, as another process is fetching", requests.progress):
                if not path.exists():
                    self._make_room(shard.bytes, url, {self.path(other) for other in keep})
                    with replacing(path) as file:
                        requests.fetch(url, file, shard.bytes, shard.sha256)
        except OSError as error:
            problem = f"the cache of shards cannot be used: {error.strerror}"
            raise DataError(self.folder, problem, "Make room there, or set data.cache to another local disk") from None

    def _make_room(self, size: int, url: str, keep: Collection[Path]) -> None:
        """Delete the least recently used shards, none of `keep` and none in use, until `size` bytes fit."""
        room, entries = self.limit, []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # a damaged one, which its reader has just deleted
                if re.fullmatch(r"[0-9a-f]{64}\.tar", path.name):
                    status = path.lstat()
                    entries.append((max(status.st_atime_ns, status.st_mtime_ns), path, status.st_size))
                    room -= status.st_size
                elif re.fullmatch(rf"\.?[0-9a-f]{{64}}.*\{PARTIAL}", path.name):
                    path.unlink()  # of a process that has ended, as this one holds the lock
        for _, path, freed in sorted(entries):
            if room < size and path not in keep:
                with suppress(BlockingIOError, FileNotFoundError, PermissionError), open_file(path, "r+b") as file:
                    lock_file(file.fileno())
                    path.unlink()
                    room += freed
        if room < size:
            need = f"{url} has {size:,} bytes, and {self.limit - room:,} bytes of it are in use"
            problem = f"{self.limit / GIGABYTE:g} GB are too few for what is needed at once in {self.folder}: {need}"
            raise ConfigError("data.cache_gb", problem, "Raise it, or lower data.shuffle_shards")

    def _lock(self, doing: str, progress: Progress) -> FileLock:
        """Wait for the lock of the cache. `doing` is reported when the process that holds it has received data."""
        self.folder.mkdir(parents=True, exist_ok=True)
        size = reported = -1
        while True:
            with suppress(BlockingIOError):
                return FileLock(self.folder / LOCK_FILE)
            with suppress(FileNotFoundError):
                size = sum(path.stat().st_size for path in self.folder.glob(f".*{PARTIAL}"))
            if size != reported:
                reported = size
                progress(doing)
            time.sleep(POLL_SECONDS)


class FetchAhead:
    """Thread that fetches the next shards. It ignores failures: the reader of the shard fetches it again."""

    def __init__(self, cache: ShardCache, folder: str):
        self._cache, self._folder, self._is_closed = cache, folder, False
        self._queue: queue.SimpleQueue[list[Shard]] = queue.SimpleQueue()
        self.want = self._queue.put
        """Fetch these shards next, in this order, instead of the ones requested before."""
        threading.Thread(target=self._run, name="shards", daemon=True).start()

    def close(self) -> None:
        """End the thread, at its next sign of progress."""
        self._is_closed = True
        self.want([])

    def _run(self) -> None:
        requests = Requests(self._check_closed, attempts=1)
        while not self._is_closed:
            shards = self._queue.get()
            for shard in shards:
                with suppress(UserError):
                    if self._queue.empty():
                        self._cache.fetch(shard, f"{self._folder}/{shard.file}", requests, shards)

    def _check_closed(self, doing: str) -> None:
        if self._is_closed:
            raise UserError("closed")
