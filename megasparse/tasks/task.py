"""Interface of downstream tasks: conversion of official files to examples, with a limit on malformed rows.

Official files without splits are split by position: of every ten examples of a file, the first belongs to the test
split, the second to validation, the other eight to training. FILE#train, FILE#validation and FILE#test name these
parts, on command lines too; FILE names the whole file.
"""

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megasparse.config.files import find_file
from megasparse.errors import ConfigError, DataError, did_you_mean
from megasparse.files import file_sha256

if TYPE_CHECKING:
    from megasparse.config.finetuning import TaskConfig

MOST_LINES = 20
MAX_SKIPPED = 0.01  # largest fraction of malformed rows in an official file
PARTS = ("train", "validation", "test")
HUB = "hf:/datasets/"  # prefix of the path of a dataset on the Hub, hf://datasets/OWNER/NAME/CONFIGURATION
Input = str | np.ndarray  # a text, or int64 token ids (L,) of the task's vocabulary


def is_remote(path: Path) -> bool:
    """True for a dataset on the Hub: a path that starts with HUB, or the word "hub" for the task's dataset."""
    return str(path) == "hub" or str(path).startswith(HUB)


def parts_of(files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the parts of the files, by split; {} if a file is missing."""
    if not all(file.exists() for file in files):
        return {}
    return {part: [file.with_name(f"{file.name}#{part}") for file in files] for part in PARTS}


def split_name(file: Path) -> tuple[Path, str | None]:
    """Split FILE#part into the file and the part; None for the whole file."""
    name, _, part = file.name.rpartition("#")
    if name and (part in PARTS or file.with_name(name).is_dir() or is_remote(file)):
        return file.with_name(name), part
    return file, None


@dataclass(frozen=True)
class SourceLocation:
    """File of an example, and its first line or number of record, from 1; None if the example is the whole file."""

    file: Path
    line: int | None = None

    def __str__(self) -> str:
        return str(self.file) if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Example:
    inputs: tuple[Any, ...]  # one Input, or two for a pair, or the inputs of another form
    label: Any  # class number, number to predict, or label of another form; None in unlabelled test files
    location: SourceLocation
    name: str  # official id, else the index in the file


class Task(ABC):
    """A downstream task. Most are rows of tasks/catalog.py; a task with files in a special format is a subclass.

    `config` is completed from the training file, so that the task can be built without it.
    """

    name: str
    metrics: tuple[str, ...]  # names in tasks/metrics.py; the first one selects the best checkpoint
    form = "labels"  # name in FORMS of tasks/run.py; the attributes below are for the form "labels"
    segments: int = 1  # number of inputs per example
    towers: bool = False  # True to encode the two inputs of a pair separately, instead of as one sequence
    source_is_file: bool = False  # True if `task.source` is the training file instead of a folder of official files
    vocabulary: int | None = None  # number of token ids if the inputs are ids; None if they are texts
    classes: tuple[str, ...] | None = None  # names of the classes in the files, by number; None for numbers
    needs_labels: bool = True  # False for prediction: labels that cannot be read are None instead of an error

    def __init__(self, config: "TaskConfig"):
        self.config, self.warnings = config, list[str]()

    @abstractmethod
    def files(self, folder: Path) -> dict[str, list[Path]]:
        """Return the official files in a folder by split ("train", "validation", "test", others), for `read`."""

    @abstractmethod
    def read(self, file: Path) -> Iterator[Example]:
        """Read the examples of a file, in order. Raises DataError naming file, line and remedy."""

    def class_of(self, label: str, location: SourceLocation) -> int:
        """Return the number of a class, given its name. Raises DataError naming the location."""
        assert self.classes is not None
        if label not in self.classes:
            problem = f'"{label[:80]}" is not a label of {self.name}'
            raise DataError(location, problem, did_you_mean(label, self.classes))
        return self.classes.index(label)


def examples_of(
    file: Path,
    rows: Iterable[tuple[SourceLocation, Any]],
    convert: Callable[[Any, SourceLocation, str], Any],
    part: str | None = None,
) -> Iterator[Any]:
    """Yield the examples of a part of an official file. Malformed rows are skipped, and listed on stderr at the end.

    rows: with their locations; a DataError for a malformed row. convert: converts a row, its location and its index.
    Raises the DataError of the first malformed row if more than MAX_SKIPPED are malformed.
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
        problem = f"{len(errors):,} of {total:,} rows are malformed, the first one: {errors[0]}"
        many = DataError(file, problem, f"At most {MAX_SKIPPED:.0%} may be: replace the file")
        raise errors[0] if len(errors) == 1 else many
    if errors:
        shown = [f"skipped: {error}" for error in errors[:MOST_LINES]]
        shown += [f"{len(errors) - MOST_LINES:,} more"] * (len(errors) > MOST_LINES)
        print(*shown, f"{file}: skipped {len(errors):,} of {total:,} rows", sep="\n", file=sys.stderr)


def split_files(task: Task, folder: Path, split: str, choices: str = "Its splits") -> list[Path]:
    """Return the official files of a split. Raises DataError, listing the `choices`, if there are none."""
    if not folder.exists() and not is_remote(folder):
        problem, kind = ("no such file", "file") if task.source_is_file else ("no such folder", "folder")
        raise DataError(folder, problem, f"Set task.source to the {kind} of {task.name}'s examples")
    if not (splits := task.files(folder)).get(split):
        hint = f"{choices}: {', '.join(splits)}" if splits else f"It contains none of {task.name}'s files"
        raise DataError(folder, f'contains no "{split}" split of {task.name}', f"{hint}. See docs/reference/tasks.md")
    return splits[split]


def existing(folder: Path, names: Mapping[str, str | Sequence[str]], inner: str = "") -> dict[str, list[Path]]:
    """Return the splits whose files, given by names or patterns, all exist.

    inner: folders, separated by |, that an archive unpacks to; the first that exists is read.
    """
    folder = next((folder / name for name in inner.split("|") if (folder / name).is_dir()), folder)
    patterns = {split: [files] if isinstance(files, str) else files for split, files in names.items()}
    paths = {split: [sorted(folder.glob(name)) for name in several] for split, several in patterns.items()}
    return {split: [path for some in lists for path in some] for split, lists in paths.items() if all(lists)}


def chosen_files(task: Task, sources: Sequence[str], split: str | None) -> tuple[str | None, list[Path]]:
    """Return the split and its files.

    sources: the folder of the official files, or files in their format, without splits. split: by default "test" if its
    examples are labelled, else "validation". If `task.needs_labels` is false: "test", "validation", or the only split.
    Raises DataError if there are none, ConfigError for a split of files.
    """
    paths = [find_file(source) for source in sources]
    if (folder := next((path for path in paths if path.is_dir() or is_remote(path)), None)) is None:
        if split is not None:
            raise ConfigError("--split", f'"{split}", but files are given', "Use the folder of the official files")
        return None, paths
    splits = task.files(folder) if len(paths) == 1 else {}
    if len(paths) > 1 or (task.source_is_file and splits == {"train": [folder]}):
        raise DataError(folder, f"is a folder without splits of {task.name}, or one of several", "Give one")
    if split is None and not task.needs_labels:
        usual = [name for name in ("test", "validation") if name in splits]
        split = [*usual, *splits][0] if usual or len(splits) == 1 else "test"
    elif split is None:
        tests = splits.get("test", [])  # either all their examples have labels, or none
        first = next(iter(task.read(tests[0])), None) if tests else None
        split = "validation" if first is None or first.label is None else "test"
    return split, split_files(task, folder, split, "Select one with --split")


def sha256_of(file: Path) -> str:
    """Return the digest of a file or its part, or of a folder's files and names; "" for a dataset on the Hub."""
    path, _ = split_name(file)
    if is_remote(path):
        return ""
    if not path.is_dir():
        return file_sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    text = "".join(f"{file.relative_to(path)} {file_sha256(file)}\n" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()
