"""Tables of your own: a column of texts or two, and one of labels or of answers."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasparse.config.files import find_file
from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.readers.rows import field, table_rows
from megasparse.tasks.readers.texts import ROUGE, names_of
from megasparse.tasks.task import Example, SourceLocation, Task

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def text_of(row: dict[str, Any], column: str, location: SourceLocation) -> str:
    """Return the text in a column. Raises DataError if there is no such column, or JSON has something else there."""
    value = field(row, column, location, "task.text")
    if not isinstance(value, str):
        problem = f'{json.dumps(value, ensure_ascii=False)[:80]} in the column "{column}" is no text'
        raise DataError(str(location), problem, "Write a text in quotation marks")
    return value


class Table(Task):
    """A CSV file (quoted as in RFC 4180) or TSV file (no quoting), whose first line names the columns, or a file of
    JSON objects, one a line (.jsonl). The file to train on is the task's source.

    Labels are classes, distinguished by their text, in JSON also by that of numbers, true and false; or, if task.labels
    is [], numbers to predict. A row without the column of labels has none, as in a file to predict on; an empty label
    is an error.
    """

    name = "table"
    source_is_file = True
    metrics = ("accuracy", "macro_f1")

    def __init__(self, config: TaskConfig):
        """Read the labels of the training file if task.labels is null. Raises DataError too."""
        super().__init__(config)
        self.segments, labels = len(config.text), config.labels
        if config.label in config.text:
            problem = f'"{config.label}" is a column of task.text too'
            raise ConfigError("task.label", problem, "Name the column of the labels")
        if labels == []:
            self.metrics = ("pearson", "spearman")
            return
        if labels is not None and (len(set(labels)) < len(labels) or len(labels) < 2):
            hint = "Name two classes or more, each once; [] predicts numbers, null takes those of the training file"
            raise ConfigError("task.labels", f"{json.dumps(labels, ensure_ascii=False)[:80]} are no classes", hint)
        self.classes = tuple(labels) if labels is not None else self._classes_of(find_file(config.source))

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
        """Return the labels of a file, sorted: as numbers if all of them are numbers, else by their text."""
        column = self.config.label
        if not file.exists():
            texts = ", ".join(f'"{text}"' for text in self.config.text)
            columns = f'{texts} (task.text) and "{column}" (task.label)'
            problem = "cannot be read (No such file or directory)"
            raise DataError(file, problem, f"Give a table with the columns {columns}: --set task.source=FILE")
        labels = ((location, field(row, column, location, "task.label")) for location, row in table_rows(file))
        names = {_label_text(label, column, location) for location, label in labels}
        if len(names) < 2:
            problem = f'{len(names)} labels in the column "{column}" ({", ".join(names)[:80]})'
            raise DataError(file, problem, "Give a file with two classes or more, or name them: task.labels")
        numbers = {label: number for label in names if (number := _number(label)) is not None}
        ranks = numbers if len(numbers) == len(names) else dict.fromkeys(names, 0.0)
        return tuple(sorted(names, key=lambda label: (ranks[label], label)))


def _label_text(value: Any, column: str, location: SourceLocation) -> str:
    """Return the text of a label: of CSV and TSV as it is, of JSON as JSON writes it, without quotation marks."""
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


class TextTable(Task):
    """A CSV, TSV or JSONL file as `table` reads it. `task.text` names the column of the texts, `task.label` that of
    their answers. The file to train on is the task's source; a row without the column of answers has no label.
    """

    name = "text_table"
    form = "texts"
    source_is_file = True
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
