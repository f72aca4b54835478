"""Your own tables: one or two columns of texts, and one of labels or answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasparse.config.files import find_file
from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.catalog import F1, SIMILARITY, Entry, RowTask
from megasparse.tasks.metrics import ROUGE
from megasparse.tasks.readers.rows import field, is_dataset, parse_number, table_rows
from megasparse.tasks.readers.texts import names_of
from megasparse.tasks.task import Example, SourceLocation, split_name


class OwnTable(RowTask):
    """A CSV file (quoted as in RFC 4180) or TSV file (no quoting) with column names in its first line, a file of JSON
    objects, one per line (.jsonl), or a Hugging Face dataset. The label column is optional.
    """

    source_is_file = True
    text_key = "task.text"

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return super().files(folder) or {"train": [folder]}

    def read(self, file: Path) -> Iterator[Example]:
        path, part = split_name(file)
        rows = table_rows(path, part) if is_dataset(path) else table_rows(file)
        for index, (location, row) in enumerate(rows):
            yield self.example(row, location, str(index))


class Table(OwnTable):
    """Classes, given by their text (in JSON, numbers, true and false too); or numbers to predict, if task.labels is [].
    An empty label is an error.
    """

    name = "table"

    def __init__(self, config: TaskConfig):
        """Read the labels of the training file if task.labels is null. Raises DataError too."""
        labels = config.labels
        metrics = SIMILARITY if labels == [] else F1
        super().__init__(config, Entry(files=(), text=tuple(config.text), label=config.label, metrics=metrics))
        if config.label in config.text:
            problem = f'"{config.label}" is also a column of task.text'
            raise ConfigError("task.label", problem, "Use the column of the labels")
        if labels == []:
            return
        if labels is not None and (len(set(labels)) < len(labels) or len(labels) < 2):
            hint = "List two classes or more, each once; [] predicts numbers, null uses the training file's classes"
            raise ConfigError("task.labels", f"{json.dumps(labels, ensure_ascii=False)[:80]} is not valid", hint)
        self.classes = tuple(labels) if labels is not None else self._classes_of(find_file(config.source))

    def resolved(self) -> TaskConfig:
        return self.config.model_copy(update={"labels": list(self.classes or ())})

    def warnings(self) -> list[str]:
        """Return a warning if the classes look like numbers to predict."""
        numbers = [parse_number(label) for label in self.classes or ()]
        if any(value is None for value in numbers) or all(value == int(value or 0) for value in numbers):
            return []
        column = self.config.label
        return [f'warning: the {len(numbers)} real numbers in the column "{column}" are treated as classes: '
                "task.labels=[] predicts numbers"]  # fmt: skip

    def _label(self, row: dict[str, Any], location: SourceLocation) -> int | float | None:
        column = self.config.label
        if column not in row:
            return None
        label = _label_text(row[column], column, location)
        if self.classes is not None:
            return self.class_of(label, location)
        if (value := parse_number(label)) is None:
            hint = "Write one, such as 3.5; or treat labels as classes: --set task.labels=null"
            raise DataError(str(location), f'"{label[:80]}" in the column "{column}" is not a number', hint)
        return value

    def _classes_of(self, file: Path) -> tuple[str, ...]:
        """Return the labels in a file, sorted by number if all are numbers, else by text."""
        column = self.config.label
        if not file.exists() and not is_dataset(file):
            texts = ", ".join(f'"{text}"' for text in self.config.text)
            columns = f'{texts} (task.text) and "{column}" (task.label)'
            problem = "cannot be read (No such file or directory)"
            raise DataError(file, problem, f"Use a table with the columns {columns}: --set task.source=FILE")
        labels = ((location, field(row, column, location, "task.label")) for location, row in table_rows(file))
        names = {_label_text(label, column, location) for location, label in labels}
        if len(names) < 2:
            problem = f'{len(names)} labels in the column "{column}" ({", ".join(names)[:80]})'
            raise DataError(file, problem, "Use a file with two classes or more, or list them in task.labels")
        numbers = {label: value for label in names if (value := parse_number(label)) is not None}
        ranks = numbers if len(numbers) == len(names) else dict.fromkeys(names, 0.0)
        return tuple(sorted(names, key=lambda label: (ranks[label], label)))


def _label_text(value: Any, column: str, location: SourceLocation) -> str:
    """Return the text of a label: unchanged in CSV and TSV; in JSON as JSON, without quotation marks."""
    if value is None or isinstance(value, dict | list):
        problem = f'{json.dumps(value, ensure_ascii=False)[:80]} in the column "{column}" is not a label'
        raise DataError(str(location), problem, "Write a text, a number, true or false")
    text = value if isinstance(value, str) else json.dumps(value)
    if not text.strip():
        raise DataError(str(location), f'no label in the column "{column}"', "Write one, or remove the row")
    return text


class TextTable(OwnTable):
    """Texts and their answers, in the columns `task.text` and `task.label`."""

    name = "text_table"

    def __init__(self, config: TaskConfig):
        source, answer = names_of(config)
        metrics = (*ROUGE, "bleu", "chrf")
        super().__init__(config, Entry(files=(), text=(source,), label=answer, metrics=metrics, form="texts"))
