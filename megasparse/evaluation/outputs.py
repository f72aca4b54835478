"""Files of results: written whole or not at all, and checked before the work begins."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megasparse.data.files import replacing
from megasparse.errors import DataError, UserError

HINT = "Make room, or choose another"


def require_writable(*paths: Path | None, sources: Sequence[str] = ()) -> None:
    """Make the folders of files to come, so that hours of work do not end at a wrong name. Raises UserError, also where
    a file would take the place of one of the sources.
    """
    for path in paths:
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}). {HINT}") from None
        if path.resolve() in [Path(source).resolve() for source in sources]:
            raise UserError(f"{path}: is one of the files that are read. Give the name of another file")
        if path.is_dir():
            raise UserError(f"{path}: is a folder. Give the name of a file")
        if not os.access(path.parent, os.W_OK):
            raise UserError(f"{path}: its folder cannot be written to. {HINT}")


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Write a file through `data.files.replacing`, and make its folder. Raises UserError where it cannot be written."""
    require_writable(path)
    try:
        with replacing(path) as out:
            yield out
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error}). {HINT}") from None


def write_json(path: Path, result: dict[str, Any]) -> None:
    with whole_file(path) as out:
        out.write(json.dumps(result, indent=2).encode() + b"\n")


def kept_rows(path: Path, keys: Sequence[str], **same: Any) -> list[dict[str, Any]]:
    """The `rows` that a command wrote into a JSON file and goes on from; none where there is no file. keys: of each
    row. same: values that stand beside the rows. Raises DataError for a file of something else.
    """
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_bytes())
        rows = list(found["rows"])
        if any(found[name] != value for name, value in same.items()) or not all({*keys} <= row.keys() for row in rows):
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError):
        with_what = "".join(f" with {name} {value}" for name, value in same.items())
        problem = f"holds no rows{with_what} that this command wrote"
        raise DataError(path, problem, "Name another file, or remove it") from None
    return rows
