"""Malformed rows of official files: each is counted and named, skipped within a limit, and an error above it."""

import sys
from pathlib import Path
from types import TracebackType

from megasparse.errors import DataError

MOST_LINES = 20
KEY = "task.max_skipped"


class Skipping:
    """The malformed rows of one file. As a context it skips the row whose DataError is raised in it.

    rows: number of rows read, which who reads them counts. limit: the part of them that may be malformed.
    """

    def __init__(self, limit: float):
        self.limit, self.rows = limit, 0
        self.errors: list[DataError] = []

    def __enter__(self) -> "Skipping":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if not isinstance(error, DataError):
            return False
        self.add(error)
        return True

    def add(self, error: DataError) -> None:
        """Count a malformed row. Raises the error itself where none may be skipped."""
        if self.limit == 0.0:
            raise error
        self.errors.append(error)

    def finish(self, file: Path) -> None:
        """Name the skipped rows on stderr. Raises the first DataError where there were more than the limit."""
        count = len(self.errors)
        if count > self.limit * self.rows:
            first = self.errors[0]
            if count == 1:
                raise first
            problem = f"{count:,} of {self.rows:,} rows are malformed, the first one: {first}"
            raise DataError(file, problem, f"That is more than {KEY} = {self.limit} allows") from first
        shown = [f"skipped: {error}" for error in self.errors[:MOST_LINES]]
        if count > MOST_LINES:
            shown.append(f"{count - MOST_LINES:,} more")
        if count:
            print(*shown, f"{file}: skipped {count:,} of {self.rows:,} rows", sep="\n", file=sys.stderr)
