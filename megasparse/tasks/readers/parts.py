"""Splits of official files that come without any, by position, so that figures can be repeated.

Of every ten examples of a file, in its order, the first is of the test split, the second of validation, the other eight
of training. FILE#train, FILE#validation and FILE#test name these parts, on command lines too; FILE alone is all of it.
"""

from collections.abc import Sequence
from pathlib import Path

PARTS = ("train", "validation", "test")


def parts_of(files: Sequence[Path]) -> dict[str, list[Path]]:
    """The parts of each of the files, by split; none where a file is missing."""
    if not all(file.exists() for file in files):
        return {}
    return {part: [file.with_name(f"{file.name}#{part}") for file in files] for part in PARTS}


def split_name(file: Path) -> tuple[Path, str | None]:
    """A file and the part of it that FILE#part names; None for all of it."""
    name, _, part = file.name.rpartition("#")
    return (file.with_name(name), part) if name and part in PARTS else (file, None)


def is_in(part: str | None, number: int) -> bool:
    """Whether an example, counted from 0, is in a part."""
    return part is None or part == {0: "test", 1: "validation"}.get(number % 10, "train")
