"""Files of results: written whole or not at all, and checked before the work begins."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megasparse.data.files import replacing
from megasparse.errors import UserError

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
