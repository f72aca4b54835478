"""Pairs of files whose lines are translations of each other."""

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import DataError
from megasparse.tasks.readers.rows import lines
from megasparse.tasks.readers.text_task import TextTask, names_of
from megasparse.tasks.task import Example


class ParallelText(TextTask):
    """A folder of train.SOURCE and train.TARGET, validation files called val, valid or dev, and test files whose names
    begin with test, each as it is or as .gz. `task.text` names the source's suffix, `task.label` the target's:
    ["en"] and "de" translate English.

    A single test file is the split "test"; of several each is the split of its name without suffixes. `read` takes the
    source's file, and finds the target's beside it; where there is none, or the file has another suffix, examples have
    no labels.
    """

    name = "parallel_text"
    metrics: tuple[str, ...] = ("bleu", "chrf")
    stems: ClassVar[dict[str, str]] = {
        "train": "train", "val": "validation", "valid": "validation", "dev": "validation",
    }  # fmt: skip
    """Names without suffixes -> their splits."""

    def __init__(self, config: TaskConfig):
        super().__init__(config)
        self.source, self.target = self.sides()

    def sides(self) -> tuple[str, str]:
        """Suffixes of the source's files and of the target's."""
        return names_of(self.config)

    def files(self, folder: Path) -> dict[str, list[Path]]:
        if found := self.found(folder):
            return found
        names = " or ".join(f"{stem}.{self.source}" for stem in self.stems)
        hint = 'Name the suffixes of source and target: --set task.text=["en"] --set task.label=de'
        raise DataError(folder, f"has no file {names} (nor .gz)", hint)

    def found(self, folder: Path) -> dict[str, list[Path]]:
        """The files by split, or nothing where there are none. Raises DataError where two files are the same split, or
        training or validation texts have no translations.
        """
        found: dict[str, list[Path]] = {}
        for file in sorted(folder.iterdir()):
            stem = file.name.removesuffix(".gz").removesuffix(f".{self.source}")
            split = self.stems.get(stem, stem if stem.startswith("test") else None)
            if split is None or file.name.removesuffix(".gz") != f"{stem}.{self.source}":
                continue
            if split in found:
                problem = f"{found[split][0].name} and {file.name} are both its {split} split"
                raise DataError(folder, problem, "Keep one of them there")
            if split in ("train", "validation") and self.translation(file) is None:
                raise DataError(file, f"has no {stem}.{self.target} beside it", "Put it there, or set task.label")
            found[split] = [file]
        tests = [split for split in found if split.startswith("test")]
        if len(tests) == 1:
            found["test"] = found.pop(tests[0])
        return found

    def read(self, file: Path) -> Iterator[Example]:
        other = self.translation(file)
        if other is not None:
            yield from aligned(file, other)
            return
        for number, (location, text) in enumerate(lines(file)):
            yield Example((text.strip(),), None, location, str(number))

    def translation(self, file: Path) -> Path | None:
        """The target file of a source file. Raises DataError where the file itself is the target's."""
        name = file.name.removesuffix(".gz")
        if name.endswith(f".{self.target}"):
            problem = f'has the suffix of the target, task.label = "{self.target}"'
            raise DataError(file, problem, f"Give the source's file, *.{self.source}")
        if not name.endswith(f".{self.source}"):
            return None
        other = f"{name.removesuffix(self.source)}{self.target}"
        return next((path for path in (file.with_name(other), file.with_name(f"{other}.gz")) if path.exists()), None)


class WMT14(ParallelText):
    """WMT 2014 as translation models are evaluated on it: train, newstest2013 to validate, newstest2014 to test."""

    name = "wmt14"
    metrics = ("bleu", "bleu_intl", "bleu_intl_uncased", "chrf")
    stems: ClassVar[dict[str, str]] = {"train": "train", "newstest2013": "validation", "newstest2014": "test"}


def aligned(source: Path, target: Path) -> Iterator[Example]:
    """An example a line, located in the source file. Raises DataError where one file has more lines than the other."""
    sides = lines(source), lines(target)
    for number, (text, answer) in enumerate(zip_longest(*sides)):
        if text is None or answer is None:
            counts = [number + (each is not None) + sum(1 for _ in side)
                      for each, side in zip((text, answer), sides, strict=True)]  # fmt: skip
            problem = f"{counts[0]:,} lines, and {target} has {counts[1]:,}"
            raise DataError(source, problem, "Give files whose lines are translations of each other")
        location, line = text
        yield Example((line.strip(),), answer[1].strip(), location, str(number))
