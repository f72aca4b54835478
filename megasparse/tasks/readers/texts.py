"""Tasks whose examples are a text and the text that answers it: translation, summaries, headlines. Labels are texts,
stripped of white space; empty ones are errors, as empty inputs are.
"""

import hashlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.metrics import ROUGE
from megasparse.tasks.readers.rows import lines, strict
from megasparse.tasks.task import Example, SourceLocation, Task, examples_of, existing


def names_of(config: TaskConfig) -> tuple[str, str]:
    """Return the names that `task.text` and `task.label` give to the two sides. Raises ConfigError unless one each."""
    if len(config.text) != 1:
        problem = f'{len(config.text)} names, and "{config.name}" reads one text'
        raise ConfigError("task.text", problem, 'Give one: task.text=["NAME"]')
    source, answer = config.text[0], config.label
    if source == answer:
        raise ConfigError("task.label", f'"{answer}" is task.text too', "Give each side its own name")
    return source, answer


class ParallelText(Task):
    """A folder of train.SOURCE and train.TARGET, validation files called val, valid or dev, and test files whose names
    begin with test, each as it is or as .gz. `task.text` names the source's suffix, `task.label` the target's:
    ["en"] and "de" translate English.

    A single test file is the split "test"; of several each is the split of its name without suffixes. `read` takes the
    source's file, and finds the target's beside it; where there is none, or the file has another suffix, examples have
    no labels.
    """

    name = "parallel_text"
    form = "texts"
    metrics: tuple[str, ...] = ("bleu", "chrf")
    stems: ClassVar[dict[str, str]] = {
        "train": "train", "val": "validation", "valid": "validation", "dev": "validation",
    }  # fmt: skip
    """Names without suffixes -> their splits."""

    def __init__(self, config: TaskConfig):
        super().__init__(config)
        self.source, self.target = self.sides()

    def sides(self) -> tuple[str, str]:
        """Return the suffixes of the source's files and of the target's."""
        return names_of(self.config)

    def files(self, folder: Path) -> dict[str, list[Path]]:
        if splits := self.splits(folder):
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

    def read(self, file: Path) -> Iterator[Example]:
        other = self.translation(file)
        if other is None:
            for number, (location, line) in enumerate(strict(lines(file))):
                yield Example((line.strip(),), None, location, str(number))
            return
        sides = strict(lines(file)), strict(lines(other))
        for number, (text, answer) in enumerate(zip_longest(*sides)):
            if text is None or answer is None:
                counts = [number + (side is not None) + sum(1 for _ in rest)
                          for side, rest in zip((text, answer), sides, strict=True)]  # fmt: skip
                problem = f"{counts[0]:,} lines, and {other} has {counts[1]:,}"
                raise DataError(file, problem, "Give files whose lines are translations of each other")
            location, line = text
            yield Example((line.strip(),), answer[1].strip(), location, str(number))

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


LISTS = {"train": "all_train.txt", "validation": "all_val.txt", "test": "all_test.txt"}
STORIES = ("cnn/stories", "dailymail/stories", "cnn_stories_tokenized", "dm_stories_tokenized")
HIGHLIGHT = "@highlight"


class CNNDailyMail(ParallelText):
    """The stories as they are downloaded (cnn/stories/*.story, dailymail/stories/*.story) or tokenised
    (cnn_stories_tokenized/, dm_stories_tokenized/), and beside them, or in url_lists/, the splits of See et al.:
    all_train.txt, all_val.txt, all_test.txt, a URL a line, whose sha1 is the name of its story.

    A story is the lines before the first @highlight, with a space between them; its summary the highlights, each on
    a line of its own. Case is kept, and no full stop is added to a highlight, where See et al. write lower case and
    add one: ROUGE sees neither.
    The other form has a line a story: train.source and train.target, val, test. There a summary is one line, so that
    rougeLsum is rougeL.

    A .story file is an example too, without a label where it has no highlights.
    """

    name = "cnn_dm"
    metrics = ROUGE

    def sides(self) -> tuple[str, str]:
        return "source", "target"

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return existing(folder, LISTS) or existing(folder / "url_lists", LISTS) or self.splits(folder)

    def read(self, file: Path) -> Iterator[Example]:
        if file.suffix == ".story":
            yield story(file)
        elif file.name in LISTS.values():
            yield from examples_of(file, lines(file), lambda url, location, number: story(_story_file(url, location)))
        else:
            yield from super().read(file)


def story(file: Path) -> Example:
    """Return the example of one .story file. Raises DataError if it cannot be read."""
    stripped = [line.strip() for _, line in strict(lines(file))]
    end = stripped.index(HIGHLIGHT) if HIGHLIGHT in stripped else len(stripped)
    highlights = [line for line in stripped[end:] if line and line != HIGHLIGHT]
    text = " ".join(line for line in stripped[:end] if line)
    return Example((text,), "\n".join(highlights) or None, SourceLocation(file), file.stem)


def _story_file(url: str, location: SourceLocation) -> Path:
    """Return the file of the story that a list names by its URL."""
    name = hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest() + ".story"
    parent = location.file.parent
    for folder in (root / inner for root in (parent, parent.parent) for inner in STORIES):
        if (folder / name).exists():
            return folder / name
    hint = f"Put all stories into {', '.join(STORIES[:2])} beside the lists"
    raise DataError(str(location), f"there is no {name} of {url[:80]}", hint)
