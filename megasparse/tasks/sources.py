"""The files that a command line names: official folders with splits, or files of a task's form."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from megasparse.config.shipped import find_file
from megasparse.data.files import file_sha256
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.readers.parts import split_name
from megasparse.tasks.task import Task, split_files


def chosen_files(task: Task, sources: Sequence[str], split: str | None) -> tuple[str | None, list[Path]]:
    """The split and its files.

    sources: the folder of the task's official files, or one or more files of their form, which have no split. split:
    None takes "test" where it has labels, else "validation". Raises DataError where there are no such files, and
    ConfigError for a split of files.
    """
    paths = [find_file(source) for source in sources]
    folder = next((path for path in paths if path.is_dir()), None)
    if folder is None:
        if split is not None:
            raise ConfigError("--split", f'"{split}", but files are given', "Give the folder of the official files")
        return None, paths
    if task.source_is_file or len(paths) > 1:
        problem = "is a folder, where files are wanted" if task.source_is_file else "is a folder, and one of several"
        hint = "" if task.source_is_file else ", or the one folder of its official files"
        raise DataError(folder, problem, f"Give files that {task.name} can read{hint}")
    split = split or ("test" if _labelled(task, task.files(folder).get("test", [])) else "validation")
    return split, split_files(task, folder, split)


def _labelled(task: Task, files: list[Path]) -> bool:
    """Whether official files have labels, which all their examples have or none."""
    first = next(iter(task.read(files[0])), None) if files else None
    return first is not None and first.label is not None


def sha256_of(file: Path) -> str:
    """The digest of a file, whole where the task reads a part; of a folder that of its files' names and digests."""
    path, _ = split_name(file)
    if not path.is_dir():
        return file_sha256(path)
    inside = sorted(each for each in path.rglob("*") if each.is_file())
    text = "".join(f"{each.relative_to(path)} {file_sha256(each)}\n" for each in inside)
    return hashlib.sha256(text.encode()).hexdigest()
