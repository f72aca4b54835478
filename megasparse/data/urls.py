"""Bytes of URLs: http(s) by the standard library, object stores by fsspec; repeated if that may help, bounded in size
and time. What comes is verified by whoever asks for it.

http(s) has no need of the extra libraries; both kinds give one `ResponseBody`, and show by the same exceptions whether
asking again may help.
"""

import http.client
import importlib
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from functools import cache
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from megasparse.callbacks import Progress
from megasparse.data.files import file_sha256
from megasparse.data.index_file import INDEX_FILE, one_line
from megasparse.errors import DataError

STALL_SECONDS = 30.0
"""Without a byte for so long, a connection counts as broken."""
BLOCK = 8 << 20  # of an object, asked for at once
WORTH_ASKING_AGAIN = {408, 425, 429}  # and all from 500 on


class Store(NamedTuple):
    """A kind of object store."""

    name: str
    library: str
    """The module that fsspec needs for it."""
    install: str


STORES = {
    "s3": Store("S3", "s3fs", "'megasparse[remote]'"),
    "gs": Store("Google Cloud Storage", "gcsfs", "'megasparse[gs]'"),
    "az": Store("Azure", "adlfs", "'megasparse[az]'"),
    "hf": Store("HuggingFace", "huggingface_hub", "huggingface_hub"),
    "file": Store("The file system", "fsspec", "'megasparse[remote]'"),
}
"""Object stores, and a file system in place of one, by the scheme of their URLs."""

T = TypeVar("T")


class Refused(Exception):
    """The answer is such that asking again would not change it."""


class OutOfRange(Exception):
    """The file is no longer than the part that was asked to be left out."""


class ResponseBody(NamedTuple):
    """Content of a URL from byte `start` on: 0, or what was asked for. `size` is that of the whole, where known."""

    start: int
    size: int | None
    tag: str
    """Changes with the content; empty if the server has none, or nobody asked."""
    read: Callable[[int], bytes]
    """Returns what has come, at most so many bytes; none at the end."""
    close: Callable[[], None]


def data_stores() -> list[str]:
    """Return the stores that data may be read from: a folder of this machine is given by its path."""
    return [scheme for scheme in STORES if scheme != "file"]


def is_url(place: str) -> bool:
    return "://" in place


def check_url(url: str, file: bool = False) -> str:
    """Return the URL of a folder without a slash at its end. Raises DataError for what is none that we read.

    file: whether file:// is one.
    """
    parts = urlsplit(url)
    named = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"  # never the password that it may have
    if parts.scheme not in (schemes := ["http", "https", *(STORES if file else data_stores())]):
        problem = f'"{parts.scheme}" is not a kind of URL that is read here'
        raise DataError(named, problem, f"Known here: {', '.join(schemes)}. Or give the path of a folder")
    if "@" in parts.netloc or parts.query or parts.fragment:
        problem = "a folder's URL has no user, password, query or fragment"
        raise DataError(named, problem, "Credentials of stores are taken from the environment")
    if (not parts.hostname and parts.scheme != "file") or not re.fullmatch(r"[!-~]+", url):
        raise DataError(ascii(named)[1:-1], "this is not a URL", "It has a host, and %20 in place of a space")
    return url.rstrip("/")


def open_url(url: str, start: int = 0, tag: str | None = None) -> ResponseBody:
    """Open a URL from byte `start` on, or from 0 if the server does not begin in the middle. Close what is returned.

    Args:
        tag: that of the content which the first bytes are of, or "": another content is opened from 0. None: any.

    Raises:
        Refused: asking again would not change the answer.
        OutOfRange: the content is not longer than `start`.
        DataError: a library is missing.
        OSError, HTTPException, ValueError: the same question may find another answer later. So does `read`, which
            waits at most STALL_SECONDS for a byte.
    """
    scheme = urlsplit(url).scheme
    if scheme in ("http", "https"):
        return _open_http(url, start, tag)
    system = object_store(url)
    key = "" if tag is None else asked(scheme, lambda: str(system.ukey(url)))
    start = 0 if tag and key != tag else start
    file = asked(scheme, lambda: system.open(url, "rb", block_size=BLOCK, cache_type="readahead"))
    asked(scheme, lambda: file.seek(start))

    def read(size: int) -> bytes:
        return asked(scheme, lambda: bytes(file.read(size)))

    return ResponseBody(start, file.size, key, read, file.close)


def _open_http(url: str, start: int, tag: str | None) -> ResponseBody:
    ranged = {"Range": f"bytes={start}-", **({"If-Range": tag} if tag else {})} if start else {}
    request = urllib.request.Request(url, headers={"User-Agent": "megasparse", "Accept-Encoding": "identity", **ranged})
    try:
        response = http_opener().open(request, timeout=STALL_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            raise OutOfRange("the server's file is shorter than what came of it before") from None
        reason = f"the server answers {error.code} ({http.client.responses.get(error.code, 'unknown')})"
        if 300 <= error.code < 400:
            raise Refused(f"{reason}: a redirect without end, or to where we do not follow") from None
        if error.code < 500 and error.code not in WORTH_ASKING_AGAIN:
            raise Refused(reason) from None
        raise OSError(reason) from None
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from None
    start = start if response.status == HTTPStatus.PARTIAL_CONTENT else 0
    content_range = response.headers.get("Content-Range", "")
    if start and not content_range.startswith(f"bytes {start}-"):
        response.close()
        raise ValueError(f'the server was asked to go on at byte {start} and answers "{content_range}"')
    length, tag = response.headers.get("Content-Length"), response.headers.get("ETag", "")
    tag = response.headers.get("Last-Modified", "") if not tag or tag.startswith("W/") else tag
    return ResponseBody(start, None if length is None else start + int(length), tag, response.read1, response.close)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Ten at most, and none from https to http: who asked for an answer that nobody can alter must get one."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if req.type == "https" and urlsplit(newurl).scheme != "https":
            raise urllib.error.HTTPError(req.full_url, code, "redirected from https to another kind", headers, fp)
        fp.close()  # urllib would read what comes with the redirect to its end, and keep it
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def http_opener() -> urllib.request.OpenerDirector:
    """Return an opener of http and https alone, also behind redirects: urllib's own opener would follow one to ftp."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        _Redirects(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def object_store(url: str, attempts: int = 1) -> Any:
    """Return the file system of fsspec that a URL is in. Raises DataError where its library is missing.

    attempts: how often S3's client sends a request before it fails; who repeats more than that request takes 1.

    Credentials, endpoint and region are those of the environment, or of the store's own files in the home directory,
    as for every tool of that store.
    """
    return _store(urlsplit(url).scheme, attempts)


@cache
def _store(scheme: str, attempts: int) -> Any:
    store = STORES[scheme]
    try:
        import fsspec

        importlib.import_module(store.library)
    except ImportError:
        problem = f"{store.library} is not installed"
        raise DataError(f"{scheme}://", problem, f"Run: pip install {store.install}") from None
    if scheme != "s3":
        return fsspec.filesystem(scheme)
    retries = {"total_max_attempts": attempts, "mode": "standard"}
    waits = {"connect_timeout": STALL_SECONDS, "read_timeout": STALL_SECONDS, "retries": retries}
    system = fsspec.filesystem(scheme, config_kwargs=waits, use_listings_cache=False)
    system.retries = 1  # it would not report that it asks again
    return system


def asked(scheme: str, call: Callable[[], T]) -> T:
    """Return the answer of an object store. The exceptions of fsspec's backends, of many libraries, become two kinds:
    Refused, and OSError if the same question may find another answer later.
    """
    name = STORES[scheme].name
    try:
        return call()
    except (FileNotFoundError, PermissionError) as error:
        raise Refused(f"{name} answers: {error}") from None
    except OSError:
        raise
    except Exception as error:
        if "credentials" in type(error).__name__.lower():
            raise Refused(f"{name} wants credentials, in the environment or its own files ({error})") from None
        raise OSError(f"{type(error).__name__}: {error}") from None


# Work on storage that fails now and then, repeated if that may help: fetching and uploading

ATTEMPTS = 8
LONGEST_PAUSE = 30.0
"""Longest pause between two attempts, which is 1, 2, 4, ... seconds."""
PATIENCE_SECONDS = 600.0
SLOWEST = 100_000  # bytes a second
"""All attempts together may take PATIENCE_SECONDS, and as long as the bytes take at SLOWEST."""
POLL_SECONDS = 0.1


class WrongContent(Exception):
    """The content is not the expected one. Repeated once."""


class GaveUp(Exception):
    """Why no attempt has succeeded, on one line. refused: whether the answer was such that none would."""

    def __init__(self, reason: str, refused: bool):
        super().__init__(reason)
        self.refused = refused


def retried(
    doing: str, attempt: Callable[[float], T], progress: Progress, size: int = 0, attempts: int = ATTEMPTS
) -> T:
    """Return the result of `attempt`, repeated if that may help; it gets the time.monotonic() by which it must end.

    doing: what is done, for messages, such as "fetching URL". size: bytes to be moved. Raises GaveUp.
    """
    until = time.monotonic() + PATIENCE_SECONDS + size / SLOWEST
    number = wrong = 0
    while True:
        number += 1
        try:
            return attempt(until)
        except Refused as error:
            raise GaveUp(one_line(str(error)), True) from None
        except WrongContent as error:
            wrong += 1
            reason = str(error)
        except (OSError, EOFError, HTTPException, ValueError) as error:
            reason = str(error) or type(error).__name__
        reason, pause = one_line(reason), min(LONGEST_PAUSE, 2.0 ** (number - 1))
        if number >= attempts or wrong == 2 or time.monotonic() + pause > until:
            raise GaveUp(f"{reason}, at attempt {number}", False)
        message = f"{doing}: attempt {number} of {attempts} failed ({reason}); again in {pause:g} s"
        print(message, file=sys.stderr, flush=True)
        _pause(pause, f"waiting before {doing} again", progress)


def _pause(seconds: float, doing: str, progress: Progress) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        progress(doing)
        time.sleep(min(POLL_SECONDS, left))


# A file of a folder of shards

PIECE = 1 << 20


class FetchError(DataError):
    """A file could not be fetched: no damage of the data, but a fault of the way to it, which may pass.

    refused: whether the answer was such that asking again would not change it.
    """

    def __init__(self, url: str, problem: str, refused: bool = False):
        hint = "Fix that, and start again: it goes on from here"
        if refused:
            hint = "Check the URL of the folder, and who may read it; then start again"
        super().__init__(url, f"this cannot be fetched: {problem}", hint)
        self.refused = refused


def fetch_bytes(url: str, most: int, progress: Progress) -> bytes:
    """Return the whole content of a URL, of at most `most` bytes. Raises FetchError."""

    def attempt(until: float) -> bytes:
        with closing(open_url(url)) as body:
            content = bytearray()
            while piece := body.read(PIECE):
                content += piece
                if len(content) > most:
                    raise Refused(f"it has more than {most:,} bytes")
                _go_on(f"fetching {url}", until, progress)
            if body.size is not None and len(content) < body.size:
                raise EOFError(f"the connection ended after {len(content):,} of {body.size:,} bytes")
            return bytes(content)

    return _retry(url, attempt, 0, ATTEMPTS, progress)


def fetch_file(
    url: str,
    size: int,
    sha256: str,
    path: Path,
    descriptor: int,
    progress: Progress,
    attempts: int = ATTEMPTS,
    listed: str = INDEX_FILE,
) -> None:
    """Fill the file `descriptor`, which is at `path`, with a URL's; what it has already is kept where it fits.

    size, sha256: what it must have in the end, by the file `listed`. Raises FetchError; DataError naming `path` where
    it cannot be written. Then it keeps what came, for the next to go on with.
    """

    def attempt(until: float) -> None:
        try:
            if os.fstat(descriptor).st_size < size:
                _append(url, size, path, descriptor, until, progress, listed)
            digest = file_sha256(descriptor, lambda: progress(f"verifying {url}"))
            if digest != sha256:
                raise WrongContent(f"its sha256 is {digest[:12]}…, {listed} says {sha256[:12]}…")
        except (WrongContent, OutOfRange) as error:
            os.ftruncate(descriptor, 0)
            raise WrongContent(str(error)) from None

    _retry(url, attempt, size, attempts, progress)


def _append(url: str, size: int, path: Path, descriptor: int, until: float, progress: Progress, listed: str) -> None:
    """Go on where the file ends, up to `size` bytes and never further."""
    with closing(open_url(url, os.fstat(descriptor).st_size)) as body:
        if body.size is not None and body.size != size:
            raise WrongContent(f"the server's file has {body.size:,} bytes, {listed} says {size:,}")
        have = body.start
        os.ftruncate(descriptor, have)
        while have < size:
            piece = body.read(min(PIECE, size - have))
            if not piece:
                raise EOFError(f"the connection ended after {have:,} of {size:,} bytes")
            _write(path, descriptor, piece, have)
            have += len(piece)
            _go_on(f"fetching {url}, {have:,} of {size:,} bytes", until, progress)


def _write(path: Path, descriptor: int, piece: bytes, offset: int) -> None:
    try:
        while piece:
            count = os.pwrite(descriptor, piece, offset)
            piece, offset = piece[count:], offset + count
    except OSError as error:
        hint = "Make room there, or choose another folder (data.cache, run.directory)"
        raise DataError(path, f"what is fetched cannot be written: {error.strerror}", hint) from None


def _go_on(doing: str, until: float, progress: Progress) -> None:
    if time.monotonic() > until:
        raise TimeoutError("it comes too slowly")
    progress(doing)


def _retry(url: str, attempt: Callable[[float], T], size: int, attempts: int, progress: Progress) -> T:
    try:
        return retried(f"fetching {url}", attempt, progress, size, attempts)
    except GaveUp as error:
        raise FetchError(url, str(error), error.refused) from None
