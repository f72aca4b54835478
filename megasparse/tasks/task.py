"""Downstream tasks: official files to examples, and malformed rows that may be skipped.

Official files without splits are split by position, so that figures can be repeated: of every ten examples of a file,
in its order, the first belongs to the test split, the second to validation, the other eight to training. FILE#train,
FILE#validation and FILE#test name these parts, on command lines too; FILE is all of it.
"""

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megasparse.config.files import find_file
from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, DataError, did_you_mean
from megasparse.files import file_sha256

MOST_LINES = 20
MAX_SKIPPED = 0.01
"""Part of an official file's rows that may be malformed."""
PARTS = ("train", "validation", "test")
HUB = "hf:/datasets/"
"""Beginning of the path of a dataset on the Hub, hf://datasets/OWNER/NAME/CONFIGURATION."""


def is_remote(path: Path) -> bool:
    """True for a dataset on the Hub: a path below HUB, or the task's own by the word "hub"."""
    return str(path) == "hub" or str(path).startswith(HUB)


def parts_of(files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the parts of each of the files, by split; none if a file is missing."""
    if not all(file.exists() for file in files):
        return {}
    return {part: [file.with_name(f"{file.name}#{part}") for file in files] for part in PARTS}


def split_name(file: Path) -> tuple[Path, str | None]:
    """Return a file and the part of it that FILE#part names; None for all of it."""
    name, _, part = file.name.rpartition("#")
    if name and (part in PARTS or file.with_name(name).is_dir() or is_remote(file)):
        return file.with_name(name), part
    return file, None


Input = str | np.ndarray
"""A text, or int64 token ids (L,) of the task's own vocabulary."""


@dataclass(frozen=True)
class SourceLocation:
    """The file and line of an example, for messages and predictions."""

    file: Path
    line: int | None = None
    """Counted from 1: the line it begins on, or the number of the record; None where it has the file to itself."""

    def __str__(self) -> str:
        return str(self.file) if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Example:
    inputs: tuple[Input, ...]
    """One input, or the two of a pair."""
    label: Any
    """The number of its class, the number to predict, or what a form other than "labels" has; None where the file has
    no label, as in official test files."""
    location: SourceLocation
    name: str
    """The official id, else the number in the file, counted from 0."""


class Task(ABC):
    """A downstream task. Most are rows of tasks/catalog.py; one whose files have no standard format is a subclass."""

    name: str
    metrics: tuple[str, ...]
    """Names in tasks/metrics.py; the first one decides which checkpoint is best."""
    form: str = "labels"
    """A name in tasks/form.py: the kind of labels and of model. The attributes below are of the form "labels"."""
    segments: int = 1
    """Number of inputs of an example."""
    towers: bool = False
    """True if the two inputs of a pair are read apart and then compared, rather than as one sequence."""
    source_is_file: bool = False
    """True if `task.source` is the file to train on, rather than the folder of the official files."""
    vocabulary: int | None = None
    """Number of token ids where the inputs are ids; None where they are texts."""
    classes: tuple[str, ...] | None = None
    """Names of the classes as the files have them, by number; None where a number is predicted."""
    needs_labels: bool = True
    """False to predict: a label that cannot be read is None instead of an error."""

    def __init__(self, config: TaskConfig):
        """Raise ConfigError if a setting does not fit the task."""
        self.config = config

    def resolved(self) -> TaskConfig:
        """Return the configuration completed from the training file, which a task built from it no longer needs."""
        return self.config

    def warnings(self) -> list[str]:
        """Return what is allowed but probably a mistake, a line each."""
        return []

    @abstractmethod
    def files(self, folder: Path) -> dict[str, list[Path]]:
        """Return the official files of a folder, by split: "train", "validation", "test" and any others, for `read`."""

    @abstractmethod
    def read(self, file: Path) -> Iterator[Example]:
        """Read the examples of one of `files`, or of another file of the same form, in its order.

        Raises DataError for what is missing or malformed, naming file and line and what to do.
        """

    def class_of(self, label: str, location: SourceLocation) -> int:
        """Return the number of a class by its name. Raises DataError naming the location."""
        assert self.classes is not None
        if label not in self.classes:
            near = did_you_mean(label, self.classes)
            hint = f"{near} " if near.startswith("Did") else ""
            hint += f"Its labels are: {', '.join(self.classes)}"
            raise DataError(str(location), f'"{label[:80]}" is no label of {self.name}', hint)
        return self.classes.index(label)


def examples_of(
    file: Path,
    rows: Iterable[tuple[SourceLocation, Any]],
    convert: Callable[[Any, SourceLocation, str], Example],
    part: str | None = None,
) -> Iterator[Example]:
    """Yield the examples of a part of an official file. Malformed rows are skipped, and named on stderr at the end.

    Args:
        rows: rows with their locations; a DataError in place of a malformed one.
        convert: makes an example of a row, its location and its number, from 0. Raises DataError for a malformed row.

    Raises:
        DataError: of the first malformed row, if more than MAX_SKIPPED are.
    """
    errors: list[DataError] = []
    total = number = 0
    for location, row in rows:
        total += 1
        try:
            if isinstance(row, DataError):
                raise row
            number += 1
            if part in (None, {1: "test", 2: "validation"}.get(number % 10, "train")):
                yield convert(row, location, str(number - 1))
        except DataError as error:
            errors.append(error)
    if len(errors) > MAX_SKIPPED * total:
        if len(errors) == 1:
            raise errors[0]
        problem = f"{len(errors):,} of {total:,} rows are malformed, the first one: {errors[0]}"
        raise DataError(file, problem, f"At most {MAX_SKIPPED:.0%} may be: replace the file") from errors[0]
    if errors:
        shown = [f"skipped: {error}" for error in errors[:MOST_LINES]]
        shown += [f"{len(errors) - MOST_LINES:,} more"] * (len(errors) > MOST_LINES)
        print(*shown, f"{file}: skipped {len(errors):,} of {total:,} rows", sep="\n", file=sys.stderr)


def split_files(task: Task, folder: Path, split: str) -> list[Path]:
    """Return the official files of one split. Raises DataError if the folder has none."""
    if not folder.exists() and not is_remote(folder):
        problem, kind = ("no such file", "file") if task.source_is_file else ("no such folder", "folder")
        raise DataError(folder, problem, f"Give the {kind} of {task.name}'s examples: --set task.source=PATH")
    splits = task.files(folder)
    if not splits.get(split):
        hint = f"It has: {', '.join(splits)}" if splits else f"It has none of {task.name}'s files"
        raise DataError(folder, f'holds no "{split}" split of {task.name}', f"{hint}. See docs/finetuning.md")
    return splits[split]


def existing(folder: Path, names: Mapping[str, str | Sequence[str]], inner: str = "") -> dict[str, list[Path]]:
    """Return the splits whose files all exist.

    names: the official file, or files, of each split. inner: the folder that an archive unpacks to, read if it exists.
    """
    folder = folder / inner if (folder / inner).is_dir() else folder
    paths = {
        split: [folder / name for name in ([files] if isinstance(files, str) else files)]
        for split, files in names.items()
    }
    return {split: files for split, files in paths.items() if all(file.exists() for file in files)}


def chosen_files(task: Task, sources: Sequence[str], split: str | None) -> tuple[str | None, list[Path]]:
    """Return the split and its files.

    sources: the folder of the task's official files, or one or more files of their form, which have no split. split:
    None takes "test" where it has labels, else "validation". Raises DataError where there are no such files, and
    ConfigError for a split of files.
    """
    paths = [find_file(source) for source in sources]
    folder = next((path for path in paths if path.is_dir() or is_remote(path)), None)
    if folder is None:
        if split is not None:
            raise ConfigError("--split", f'"{split}", but files are given', "Give the folder of the official files")
        return None, paths
    if len(paths) > 1 or (not task.files(folder).keys() - {"train"} and task.source_is_file):
        hint = "Give files that it can read, or the one folder of its official files or of a dataset"
        raise DataError(folder, f"is a folder without splits of {task.name}, or one of several", hint)
    if split is None:
        tests = task.files(folder).get("test", [])  # all their examples have labels, or none
        first = next(iter(task.read(tests[0])), None) if tests else None
        split = "validation" if first is None or first.label is None else "test"
    return split, split_files(task, folder, split)


def sha256_of(file: Path) -> str:
    """Return the digest of a file, whole if the task reads a part; of a folder that of its files' names and digests;
    nothing of a dataset on the Hub.
    """
    path, _ = split_name(file)
    if is_remote(path):
        return ""
    if not path.is_dir():
        return file_sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    text = "".join(f"{file.relative_to(path)} {file_sha256(file)}\n" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()
