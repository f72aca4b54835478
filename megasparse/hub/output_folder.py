"""Folders that appear whole or not at all."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megasparse.data.files import sync_folder
from megasparse.errors import HubError


def refuse_existing(output: Path) -> None:
    """Raise HubError where there is something of this name."""
    if os.path.lexists(output):
        raise HubError(output, "exists already", "Give the name of a new folder")


@contextmanager
def appearing(output: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name `output` when the block ends, on disk by then, and vanishes when it fails.

    Raises HubError where `output` exists or cannot be written.
    """
    refuse_existing(output)
    temporary = output.with_name(f".{output.name}-{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for folder, _, files in os.walk(temporary, topdown=False):
            for name in files:
                with open(Path(folder, name), "rb") as file:
                    os.fsync(file.fileno())
            sync_folder(Path(folder))
        temporary.rename(output)
        sync_folder(output.parent)
    except OSError as error:
        raise HubError(
            output, f"cannot be written ({error.strerror or error})", "Make room, or choose another"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
