"""Tasks with files aligned line by line: translation, and one-line summaries. Labels are texts."""

from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.catalog import Entry, RowTask
from megasparse.tasks.metrics import ROUGE
from megasparse.tasks.readers.rows import Rows, lines, strict


def names_of(config: TaskConfig) -> tuple[str, str]:
    """Return the names of the two sides, from `task.text` and `task.label`. Raises ConfigError unless one each."""
    if len(config.text) != 1:
        problem = f'{len(config.text)} names, but "{config.name}" reads one text'
        raise ConfigError("task.text", problem, 'Use one: task.text=["NAME"]')
    source, answer = config.text[0], config.label
    if source == answer:
        raise ConfigError("task.label", f'"{answer}" is also task.text', "Use different names for the two sides")
    return source, answer


class ParallelText(RowTask):
    """A folder of train.SOURCE and train.TARGET, validation files called val, valid or dev, and test files whose names
    start with test, each optionally with .gz; or a dataset with these columns. `task.text` is the suffix of the source,
    `task.label` of the target: ["en"] and "de" translate English.

    A single test file is the split "test"; of several, each is a split named by the file without suffixes. `read` takes
    the source's file, and finds the target's next to it. Without one, or for a file with another suffix, examples are
    unlabelled.
    """

    name = "parallel_text"
    metrics: tuple[str, ...] = ("bleu", "chrf")
    stems: ClassVar[dict[str, str]] = {"train": "train", **dict.fromkeys(("val", "valid", "dev"), "validation")}
    """Splits by file name without suffixes."""

    def __init__(self, config: TaskConfig):
        columns, hub = self.sides(config)
        self.source, self.target = (names.partition("|")[0] for names in columns)
        entry = Entry(
            files=(self.splits,), rows=self.rows, text=columns[:1], label=columns[1], form="texts", hub=hub,
            metrics=self.metrics,
        )  # fmt: skip
        super().__init__(config, entry)

    def sides(self, config: TaskConfig) -> tuple[tuple[str, str], str]:
        """Return the columns of both sides, the suffix of its files first, and the dataset on the Hub."""
        return names_of(config), ""

    def files(self, folder: Path) -> dict[str, list[Path]]:
        if splits := super().files(folder):
            return splits
        names = " or ".join(f"{stem}.{self.source}" for stem in self.stems)
        hint = 'Set the suffixes of source and target: --set task.text=["en"] --set task.label=de'
        raise DataError(folder, f"contains no file {names} (nor .gz)", hint)

    def splits(self, folder: Path) -> dict[str, list[Path]]:
        """Return the files by split; {} if there are none. Raises DataError if two files are in the same split, or if
        training or validation texts lack translations.
        """
        splits: dict[str, list[Path]] = {}
        for file in sorted(folder.iterdir()):
            stem = file.name.removesuffix(".gz").removesuffix(f".{self.source}")
            split = self.stems.get(stem, stem if stem.startswith("test") else None)
            if split is None or file.name.removesuffix(".gz") != f"{stem}.{self.source}":
                continue
            if split in splits:
                problem = f"{splits[split][0].name} and {file.name} are both in its {split} split"
                raise DataError(folder, problem, "Keep one of them")
            if split in ("train", "validation") and self.translation(file) is None:
                raise DataError(file, f"the file {stem}.{self.target} is missing", "Add it there, or set task.label")
            splits[split] = [file]
        tests = [split for split in splits if split.startswith("test")]
        if len(tests) == 1:
            splits["test"] = splits.pop(tests[0])
        return splits

    def rows(self, file: Path) -> Rows:
        """Yield the lines of both sides by column."""
        if (other := self.translation(file)) is None:
            yield from ((location, {self.source: line.strip()}) for location, line in strict(lines(file)))
            return
        sides = strict(lines(file)), strict(lines(other))
        for number, (read, answer) in enumerate(zip_longest(*sides)):
            if read is None or answer is None:
                counts = [number + (side is not None) + sum(1 for _ in rest)
                          for side, rest in zip((read, answer), sides, strict=True)]  # fmt: skip
                problem = f"{counts[0]:,} lines, but {counts[1]:,} in {other}"
                raise DataError(file, problem, "Use files whose lines are translations of each other")
            yield read[0], {self.source: read[1].strip(), self.target: answer[1]}

    def translation(self, file: Path) -> Path | None:
        """Return the target file of a source file. Raises DataError if the file itself is the target's."""
        name = file.name.removesuffix(".gz")
        if name.endswith(f".{self.target}"):
            problem = f'its suffix is the target\'s, task.label = "{self.target}"'
            raise DataError(file, problem, f"Use the source's file, *.{self.source}")
        if not name.endswith(f".{self.source}"):
            return None
        other = f"{name.removesuffix(self.source)}{self.target}"
        return next((path for path in (file.with_name(other), file.with_name(f"{other}.gz")) if path.exists()), None)


class WMT14(ParallelText):
    """WMT 2014 with the usual splits: train, newstest2013 for validation, newstest2014 for test."""

    name = "wmt14"
    metrics = ("bleu", "bleu_intl", "bleu_intl_uncased", "chrf")
    stems: ClassVar[dict[str, str]] = {"train": "train", "newstest2013": "validation", "newstest2014": "test"}

    def sides(self, config: TaskConfig) -> tuple[tuple[str, str], str]:
        source, target = names_of(config)
        return (source, target), f"wmt/wmt14/{target if source == 'en' else source}-en"


class CNNDailyMail(ParallelText):
    """Stories and summaries, one per line: train.source and train.target, val, test; or the dataset on the Hub, with
    one highlight per line. In files a summary is one line, so that rougeLsum equals rougeL.
    """

    name = "cnn_dm"
    metrics = ROUGE

    def sides(self, config: TaskConfig) -> tuple[tuple[str, str], str]:
        return ("source|article", "target|highlights"), "abisee/cnn_dailymail/3.0.0"

    def files(self, folder: Path) -> dict[str, list[Path]]:
        if folder.is_dir() and (any(folder.glob("*/stories")) or any(folder.glob("*_stories_tokenized"))):
            hint = 'Set task.source to "hub", a copy of abisee/cnn_dailymail, or a folder of train.source, train.target'
            raise DataError(folder, "contains .story files, which are not supported", hint)
        return super().files(folder)
