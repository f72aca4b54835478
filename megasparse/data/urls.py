"""Files at URLs, read by fsspec and repeated if that may help. fsspec is imported when the first URL is used."""

import hashlib
import importlib
import re
import sys
import time
from collections.abc import Callable, Collection
from contextlib import closing
from functools import cache
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from megasparse.callbacks import Progress
from megasparse.data.index_file import one_line
from megasparse.errors import DataError

STALL_SECONDS = 30.0  # without a byte for so long, a connection counts as broken
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
    """Failed request to a store. refused: True if the same request would fail again."""

    def __init__(self, reason: str, refused: bool = False):
        super().__init__(one_line(reason))
        self.refused = refused


class WrongContent(StoreError):
    """The content is not the expected one. It is fetched again once."""


class FetchError(DataError):
    """Failure of all attempts. refused: True if a further attempt would fail too."""

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
    parts = urlsplit(url)
    is_valid = parts.scheme in schemes and (parts.hostname or parts.scheme == "file")
    if not is_valid or not re.fullmatch(r"[!-~]+", url) or re.search("[@?#]", url):
        name = ascii(f"{parts.scheme}://{parts.hostname or ''}{parts.path}")[1:-1]
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


def asked(call: Callable[[], T]) -> T:
    """Return the answer of a store. Exceptions of its libraries become StoreError, without passwords and queries."""
    try:
        return call()
    except StoreError:
        raise
    except Exception as error:
        kind, status = type(error).__name__, getattr(error, "status", 0)  # of aiohttp's errors
        status = status if isinstance(status, int) else 0
        reason = f"{status} {getattr(error, 'message', '')}" if status else str(error) or kind
        reason = re.sub(r"(?<=://)[^/\s]*@|\?[^\s'\")]*", "", reason)
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
        return asked(lambda: system.open(url, "rb", block_size=BLOCK, cache_type="readahead"))
    # A block size of 0 streams one GET; without a size fsspec would send a HEAD first
    file = asked(lambda: system.open(url, "rb", block_size=0, size=1, headers={"Accept-Encoding": "identity"}))
    if scheme == "https" and any(answer.url.scheme != "https" for answer in (*file.r.history, file.r)):
        file.close()
        raise StoreError("it redirects from https to http", True)
    return file


def fetch(url: str, out: IO[bytes], progress: Progress, size: int, sha256: str = "", attempts: int = ATTEMPTS) -> None:
    """Replace the content of `out` by that of a URL, of `size` bytes; without a sha256, of at most so many.

    Raises FetchError; OSError if `out` cannot be written.
    """

    def attempt() -> None:
        out.seek(0)
        out.truncate()
        digest = hashlib.sha256()
        with closing(open_url(url)) as file:
            while piece := asked(lambda: bytes(file.read(PIECE))):
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
        while (left := until - time.monotonic()) > 0:
            progress(f"waiting before {doing} {url} again")
            time.sleep(min(POLL_SECONDS, left))
