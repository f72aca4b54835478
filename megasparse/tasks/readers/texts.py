"""Tasks whose files are aligned line by line: translation, and summaries of a line each. Labels are texts."""

from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.catalog import Entry, RowTask
from megasparse.tasks.metrics import ROUGE
from megasparse.tasks.readers.rows import Rows, lines, strict


def names_of(config: TaskConfig) -> tuple[str, str]:
    """Return the names that `task.text` and `task.label` give to the two sides. Raises ConfigError unless one each."""
    if len(config.text) != 1:
        problem = f'{len(config.text)} names, and "{config.name}" reads one text'
        raise ConfigError("task.text", problem, 'Give one: task.text=["NAME"]')
    source, answer = config.text[0], config.label
    if source == answer:
        raise ConfigError("task.label", f'"{answer}" is task.text too', "Give each side its own name")
    return source, answer


class ParallelText(RowTask):
    """A folder of train.SOURCE and train.TARGET, validation files called val, valid or dev, and test files whose names
    begin with test, each as it is or as .gz; or a dataset with these columns. `task.text` names the source's suffix,
    `task.label` the target's: ["en"] and "de" translate English.

    A single test file is the split "test"; of several each is the split of its name without suffixes. `read` takes the
    source's file, and finds the target's beside it; where there is none, or the file has another suffix, examples have
    no labels.
    """

    name = "parallel_text"
    metrics: tuple[str, ...] = ("bleu", "chrf")
    stems: ClassVar[dict[str, str]] = {"train": "train", **dict.fromkeys(("val", "valid", "dev"), "validation")}
    """Names without suffixes -> their splits."""

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
        hint = 'Name the suffixes of source and target: --set task.text=["en"] --set task.label=de'
        raise DataError(folder, f"has no file {names} (nor .gz)", hint)

    def splits(self, folder: Path) -> dict[str, list[Path]]:
        """Return the files by split, if there are any. Raises DataError if two files are the same split, or training or
        validation texts have no translations.
        """
        splits: dict[str, list[Path]] = {}
        for file in sorted(folder.iterdir()):
            stem = file.name.removesuffix(".gz").removesuffix(f".{self.source}")
            split = self.stems.get(stem, stem if stem.startswith("test") else None)
            if split is None or file.name.removesuffix(".gz") != f"{stem}.{self.source}":
                continue
            if split in splits:
                problem = f"{splits[split][0].name} and {file.name} are both its {split} split"
                raise DataError(folder, problem, "Keep one of them there")
            if split in ("train", "validation") and self.translation(file) is None:
                raise DataError(file, f"has no {stem}.{self.target} beside it", "Put it there, or set task.label")
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
                problem = f"{counts[0]:,} lines, and {other} has {counts[1]:,}"
                raise DataError(file, problem, "Give files whose lines are translations of each other")
            yield read[0], {self.source: read[1].strip(), self.target: answer[1]}

    def translation(self, file: Path) -> Path | None:
        """Return the target file of a source file. Raises DataError if the file itself is the target's."""
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

    def sides(self, config: TaskConfig) -> tuple[tuple[str, str], str]:
        source, target = names_of(config)
        return (source, target), f"wmt/wmt14/{target if source == 'en' else source}-en"


class CNNDailyMail(ParallelText):
    """Stories and summaries, a line each: train.source and train.target, val, test; or the dataset of the Hub, whose
    highlights stand on lines of their own. In files a summary is one line, so that rougeLsum is rougeL.
    """

    name = "cnn_dm"
    metrics = ROUGE

    def sides(self, config: TaskConfig) -> tuple[tuple[str, str], str]:
        return ("source|article", "target|highlights"), "abisee/cnn_dailymail/3.0.0"

    def files(self, folder: Path) -> dict[str, list[Path]]:
        if folder.is_dir() and (any(folder.glob("*/stories")) or any(folder.glob("*_stories_tokenized"))):
            hint = 'Set task.source to "hub", a copy of abisee/cnn_dailymail, or a folder of train.source, train.target'
            raise DataError(folder, "holds .story files, which are read from the dataset of the Hub instead", hint)
        return super().files(folder)
