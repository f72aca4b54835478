"""Work on storage that fails now and then, repeated where that may help: fetching and uploading."""

import sys
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import TypeVar

from megasparse.callbacks import Progress
from megasparse.data.index_file import one_line
from megasparse.data.urls import Refused

ATTEMPTS = 8
LONGEST_PAUSE = 30.0
"""Longest pause between two attempts, which is 1, 2, 4, ... seconds."""
PATIENCE_SECONDS = 600.0
SLOWEST = 100_000  # bytes a second
"""All attempts together may take PATIENCE_SECONDS, and as long as the bytes take at SLOWEST."""
POLL_SECONDS = 0.1

T = TypeVar("T")


class WrongContent(Exception):
    """What is there is not what should be. Repeated once."""


class GaveUp(Exception):
    """Why no attempt has succeeded, on one line. refused: whether the answer was such that none would."""

    def __init__(self, reason: str, refused: bool):
        super().__init__(reason)
        self.refused = refused


def retried(
    doing: str, attempt: Callable[[float], T], progress: Progress, size: int = 0, attempts: int = ATTEMPTS
) -> T:
    """The result of `attempt`, which gets the time.monotonic() by which it must end, repeated where that may help.

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
