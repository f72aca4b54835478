"""Tasks with files aligned line by line: translation, and one-line summaries. Labels are texts."""

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import DataError
from megasparse.tasks.catalog import Entry, RowTask
from megasparse.tasks.readers.rows import Rows, lines, strict


class ParallelText(RowTask):
    """A folder of files STEM.SOURCE and STEM.TARGET, each optionally with .gz; or a dataset with these columns.
    `task.text` is the suffix of the source, `task.label` of the target: ["en"] and "de" translate English. The entry's
    files are the stems of each split.

    Files whose names start with test are test files: a single one is the split "test"; of several, each is a split
    named by its stem. `read` takes the source's file, and finds the target's next to it. Without one, or for a file
    with another suffix, examples are unlabelled.
    """

    def __init__(self, config: TaskConfig, entry: Entry):
        super().__init__(config, entry)
        self.source, self.target = (str(names).partition("|")[0] for names in (*self.text, self.label))
        other = self.target if self.source == "en" else self.source
        self.entry = replace(entry, hub=entry.hub.format(other=other), files=())
        splits = ((split, [names] if isinstance(names, str) else names) for split, names in entry.files[0].items())
        self.stems = {stem: split for split, stems in splits for stem in stems}

    def files(self, folder: Path) -> dict[str, list[Path]]:
        """Return the files by split. Raises DataError if there are none, if two files are in the same split, or if
        training or validation texts lack translations.
        """
        if splits := super().files(folder):
            return splits
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
        if not splits:
            names = " or ".join(f"{stem}.{self.source}" for stem in self.stems)
            hint = 'Set the suffixes of source and target: --set task.text=["en"] --set task.label=de'
            raise DataError(folder, f"contains no file {names} (nor .gz)", hint)
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
