"""A file of a folder of shards, fetched from its URL: tried again where that may help, bounded in size and time."""

import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from megasparse.callbacks import Progress
from megasparse.data.files import file_sha256
from megasparse.data.index_file import INDEX_FILE
from megasparse.data.retrying import ATTEMPTS, GaveUp, WrongContent, retried
from megasparse.data.urls import OutOfRange, Refused, open_url
from megasparse.errors import DataError

PIECE = 1 << 20

T = TypeVar("T")


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
    """The whole content of a URL, of at most `most` bytes. Raises FetchError."""

    def attempt(until: float) -> bytes:
        with closing(open_url(url)) as body:
            content = bytearray()
            while piece := body.stream.read(PIECE):
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
            raise WrongContent(str(error) or "the server's file is shorter than what came of it before") from None

    _retry(url, attempt, size, attempts, progress)


def _append(url: str, size: int, path: Path, descriptor: int, until: float, progress: Progress, listed: str) -> None:
    """Go on where the file ends, up to `size` bytes and never further."""
    with closing(open_url(url, os.fstat(descriptor).st_size)) as body:
        if body.size is not None and body.size != size:
            raise WrongContent(f"the server's file has {body.size:,} bytes, {listed} says {size:,}")
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
