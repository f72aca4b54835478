"""Your own tables: texts with a label, or with a text that answers them."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from megasparse.config.files import find_file
from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.readers.rows import comma_separated, field, json_lines, tab_separated
from megasparse.tasks.readers.texts import ROUGE, TextTask, names_of
from megasparse.tasks.task import Example, SourceLocation, Task

READERS: dict[str, Callable[[Path], Iterator[tuple[SourceLocation, dict[str, Any]]]]] = {
    ".csv": comma_separated, ".tsv": tab_separated, ".jsonl": json_lines,
}  # fmt: skip
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class Table(Task):
    """A CSV file (quoted as RFC 4180 has it) or TSV file (no quoting), whose first line names the columns, or a file of
    JSON objects, one a line (.jsonl). The file to train on is the task's source.

    Labels are classes, distinguished by their text, in JSON also by that of numbers, true and false; or, where
    task.labels is [], numbers to predict. A row without the column of labels has none, as in a file to predict on; an
    empty label is an error.
    """

    name = "table"
    source_is_file: ClassVar[bool] = True
    metrics = ("accuracy", "macro_f1")

    def __init__(self, config: TaskConfig):
        """Read the labels of the training file where task.labels is null. Raises DataError too."""
        super().__init__(config)
        self.segments = len(config.text)
        if config.label in config.text:
            problem = f'"{config.label}" is a column of task.text too'
            raise ConfigError("task.label", problem, "Name the column of the labels")
        if config.labels == []:
            self.metrics = ("pearson", "spearman")
            return
        self.classes = (
            _classes(config.labels) if config.labels is not None else self._classes_of(find_file(config.source))
        )

    def resolved(self) -> TaskConfig:
        return self.config.model_copy(update={"labels": list(self.classes or ())})

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return {"train": [folder]}

    def read(self, file: Path) -> Iterator[Example]:
        for number, (location, row) in enumerate(table_rows(file)):
            inputs = tuple(text_of(row, column, location) for column in self.config.text)
            yield Example(inputs, self._label(row, location), location, str(number))

    def _label(self, row: dict[str, Any], location: SourceLocation) -> int | float | None:
        if self.config.label not in row:
            return None
        label = _label_text(row[self.config.label], self.config.label, location)
        if self.classes is not None:
            return self.class_of(label, location)
        number = _number(label)
        if number is None:
            hint = "Write one, such as 3.5; or take labels as classes: --set task.labels=null"
            raise DataError(str(location), f'"{label[:80]}" in the column "{self.config.label}" is no number', hint)
        return number

    def _classes_of(self, file: Path) -> tuple[str, ...]:
        """The labels of a file, sorted: as numbers where all of them are, else by their text."""
        column = self.config.label
        if not file.exists():
            texts = ", ".join(f'"{text}"' for text in self.config.text)
            columns = f'{texts} (task.text) and "{column}" (task.label)'
            problem = "cannot be read (No such file or directory)"
            raise DataError(file, problem, f"Give a table with the columns {columns}: --set task.source=FILE")
        labels = ((location, field(row, column, location, "task.label")) for location, row in table_rows(file))
        found = {_label_text(label, column, location) for location, label in labels}
        if len(found) < 2:
            problem = f'{len(found)} labels in the column "{column}" ({", ".join(found)[:80]})'
            raise DataError(file, problem, "Give a file with two classes or more, or name them: task.labels")
        numbers = {label: number for label in found if (number := _number(label)) is not None}
        ranks = numbers if len(numbers) == len(found) else dict.fromkeys(found, 0.0)
        return tuple(sorted(found, key=lambda label: (ranks[label], label)))


def _classes(labels: list[str]) -> tuple[str, ...]:
    if len(set(labels)) < len(labels) or len(labels) < 2:
        hint = "Name two classes or more, each once; [] predicts numbers, null takes those of the training file"
        raise ConfigError("task.labels", f"{json.dumps(labels, ensure_ascii=False)[:80]} are no classes", hint)
    return tuple(labels)


def table_rows(file: Path) -> Iterator[tuple[SourceLocation, dict[str, Any]]]:
    """The rows of a file, by column. Raises DataError for a file that none of READERS takes, and as these do."""
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        hint = f"Give a file whose name ends in {', '.join(READERS)}"
        raise DataError(file, f'"{file.suffix}" is no known kind of table', hint)
    return reader(file)


def text_of(row: dict[str, Any], column: str, location: SourceLocation) -> str:
    """The text in a column. Raises DataError where there is no such column, or JSON has something else there."""
    value = field(row, column, location, "task.text")
    if not isinstance(value, str):
        problem = f'{json.dumps(value, ensure_ascii=False)[:80]} in the column "{column}" is no text'
        raise DataError(str(location), problem, "Write a text in quotation marks")
    return value


def _label_text(value: Any, column: str, location: SourceLocation) -> str:
    """The text of a label: of CSV and TSV as it stands, of JSON as JSON writes it, without quotation marks."""
    if value is None or isinstance(value, dict | list):
        problem = f'{json.dumps(value, ensure_ascii=False)[:80]} in the column "{column}" is no label'
        raise DataError(str(location), problem, "Write a text, a number, true or false")
    text = value if isinstance(value, str) else json.dumps(value)
    if not text.strip():
        raise DataError(str(location), f'no label in the column "{column}"', "Write one, or remove the row")
    return text


def _number(label: str) -> float | None:
    number = float(label) if NUMBER.fullmatch(label) else math.inf
    return number if math.isfinite(number) else None


class TextTable(TextTask):
    """A CSV, TSV or JSONL file as `table` reads it. `task.text` names the column of the texts, `task.label` that of
    their answers. The file to train on is the task's source; a row without the column of answers has no label.
    """

    name = "text_table"
    source_is_file: ClassVar[bool] = True
    metrics = (*ROUGE, "bleu", "chrf")

    def __init__(self, config: TaskConfig):
        super().__init__(config)
        self.source, self.answer = names_of(config)

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return {"train": [folder]}

    def read(self, file: Path) -> Iterator[Example]:
        for number, (location, row) in enumerate(table_rows(file)):
            label = text_of(row, self.answer, location).strip() if self.answer in row else None
            yield Example((text_of(row, self.source, location),), label, location, str(number))
