"""A file of a folder of shards, fetched from its URL: tried again where that may help, bounded in size and time."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar

from megasparse.callbacks import Progress
from megasparse.data.files import file_sha256
from megasparse.data.index_file import INDEX_FILE, Shard, one_line
from megasparse.data.urls import OutOfRange, Refused, open_url
from megasparse.errors import DataError

PIECE = 1 << 20
ATTEMPTS = 8
LONGEST_PAUSE = 30.0
"""Longest pause between two attempts, which is 1, 2, 4, ... seconds."""
PATIENCE_SECONDS = 600.0
SLOWEST = 100_000  # bytes a second
"""All attempts together may take PATIENCE_SECONDS, and as long as the file takes at SLOWEST."""
POLL_SECONDS = 0.1

T = TypeVar("T")


class FetchError(DataError):
    """A file could not be fetched: no damage of the data, but a fault of the way to it, which may pass."""

    def __init__(self, url: str, problem: str, hint: str = "Fix that, and start again: it goes on from here"):
        super().__init__(url, f"this cannot be fetched: {problem}", hint)


class WrongContent(Exception):
    """The server's content is not what the index says."""


def fetch_bytes(url: str, most: int, progress: Progress) -> bytes:
    """The whole content of a URL, of at most `most` bytes. Raises FetchError."""

    def attempt(until: float) -> bytes:
        with closing(open_url(url)) as body:
            content = bytearray()
            while piece := body.stream.read(PIECE):
                content += piece
                if len(content) > most:
                    raise Refused(f"it has more than {most:,} bytes, too many for an index")
                _go_on(f"fetching {url}", until, progress)
            if body.size is not None and len(content) < body.size:
                raise EOFError(f"the connection ended after {len(content):,} of {body.size:,} bytes")
            return bytes(content)

    return _retry(url, attempt, 0, ATTEMPTS, progress)


def fetch_shard(
    url: str, shard: Shard, path: Path, descriptor: int, progress: Progress, attempts: int = ATTEMPTS
) -> None:
    """Fill the file `descriptor`, which is at `path`, with a shard; what it has already is kept where it fits.

    When this returns, its size and sha256 are those of the index. Raises FetchError; DataError naming `path` where it
    cannot be written. Then it keeps what came, for the next to go on with.
    """

    def attempt(until: float) -> None:
        try:
            if os.fstat(descriptor).st_size < shard.bytes:
                _append(url, shard.bytes, path, descriptor, until, progress)
            digest = file_sha256(descriptor, lambda: progress(f"verifying {url}"))
            if digest != shard.sha256:
                raise WrongContent(f"its sha256 is {digest[:12]}…, {INDEX_FILE} says {shard.sha256[:12]}…")
        except (WrongContent, OutOfRange) as error:
            os.ftruncate(descriptor, 0)
            raise WrongContent(str(error) or "the server's file is shorter than what came of it before") from None

    _retry(url, attempt, shard.bytes, attempts, progress)


def _append(url: str, size: int, path: Path, descriptor: int, until: float, progress: Progress) -> None:
    """Go on where the file ends, up to `size` bytes and never further."""
    with closing(open_url(url, os.fstat(descriptor).st_size)) as body:
        if body.size is not None and body.size != size:
            raise WrongContent(f"the server's file has {body.size:,} bytes, {INDEX_FILE} says {size:,}")
        have = body.start
        os.ftruncate(descriptor, have)
        while have < size:
            piece = body.stream.read(min(PIECE, size - have))
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
        hint = "Make room there, or set data.cache to another folder"
        raise DataError(path, f"a shard cannot be written to the cache: {error.strerror}", hint) from None


def _go_on(doing: str, until: float, progress: Progress) -> None:
    if time.monotonic() > until:
        raise TimeoutError("it comes too slowly")
    progress(doing)


def _retry(url: str, attempt: Callable[[float], T], size: int, attempts: int, progress: Progress) -> T:
    """The result of `attempt`, which gets the time.monotonic() by which it must end, repeated where that may help."""
    until = time.monotonic() + PATIENCE_SECONDS + size / SLOWEST
    number = wrong = 0
    while True:
        number += 1
        try:
            return attempt(until)
        except Refused as error:
            hint = "Check the URL of the folder, and who may read it; then start again"
            raise FetchError(url, one_line(str(error)), hint) from None
        except WrongContent as error:
            wrong += 1
            reason = str(error)
        except (OSError, EOFError, HTTPException, ValueError) as error:
            reason = str(error) or type(error).__name__
        reason, pause = one_line(reason), min(LONGEST_PAUSE, 2.0 ** (number - 1))
        if number >= attempts or wrong == 2 or time.monotonic() + pause > until:
            raise FetchError(url, f"{reason}, at attempt {number}")
        message = f"fetching {url}: attempt {number} of {attempts} failed ({reason}); again in {pause:g} s"
        print(message, file=sys.stderr, flush=True)
        _pause(pause, f"waiting to fetch {url} again", progress)


def _pause(seconds: float, doing: str, progress: Progress) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        progress(doing)
        time.sleep(min(POLL_SECONDS, left))
