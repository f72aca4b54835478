"""The names inside a run's checkpoint folder. No torch here: the supervisor reads them too."""

import re
from pathlib import Path

TEMPORARY = ".tmp-"
"""What is being written or deleted; a crash may leave it."""


def list_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints in `directory`, oldest first.

    Saving renames a complete one to its number, so a numbered directory that is not complete is a damaged one, to be
    refused by name when it is opened and never passed over in silence.
    """
    if not directory.is_dir():
        return []
    return sorted((p for p in directory.iterdir() if re.fullmatch(r"\d{8,}", p.name)), key=lambda p: int(p.name))


def find_newest(directory: str | Path) -> Path | None:
    """The checkpoint of the highest step in `directory`, or None where there is none."""
    found = list_checkpoints(Path(directory))
    return found[-1] if found else None
