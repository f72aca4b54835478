"""Tables of your own: a column of texts or two, and one of labels or of answers."""

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
    """A CSV file (quoted as in RFC 4180), a TSV file (no quoting), whose first line names the columns, a file of JSON
    objects, one a line (.jsonl), or a dataset of Hugging Face. A row without the column of labels has none.
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
    """Classes, distinguished by their text, in JSON also by that of numbers, true and false; or, if task.labels is [],
    numbers to predict. An empty label is an error.
    """

    name = "table"

    def __init__(self, config: TaskConfig):
        """Read the labels of the training file if task.labels is null. Raises DataError too."""
        labels = config.labels
        metrics = SIMILARITY if labels == [] else F1
        super().__init__(config, Entry(files=(), text=tuple(config.text), label=config.label, metrics=metrics))
        if config.label in config.text:
            problem = f'"{config.label}" is a column of task.text too'
            raise ConfigError("task.label", problem, "Name the column of the labels")
        if labels == []:
            return
        if labels is not None and (len(set(labels)) < len(labels) or len(labels) < 2):
            hint = "Name two classes or more, each once; [] predicts numbers, null takes those of the training file"
            raise ConfigError("task.labels", f"{json.dumps(labels, ensure_ascii=False)[:80]} are no classes", hint)
        self.classes = tuple(labels) if labels is not None else self._classes_of(find_file(config.source))

    def resolved(self) -> TaskConfig:
        return self.config.model_copy(update={"labels": list(self.classes or ())})

    def warnings(self) -> list[str]:
        """Return a warning if the classes look like numbers to predict."""
        numbers = [parse_number(label) for label in self.classes or ()]
        if any(value is None for value in numbers) or all(value == int(value or 0) for value in numbers):
            return []
        column = self.config.label
        return [f'warning: the {len(numbers)} real numbers in the column "{column}" are taken as classes: '
                "task.labels=[] predicts numbers"]  # fmt: skip

    def _label(self, row: dict[str, Any], location: SourceLocation) -> int | float | None:
        column = self.config.label
        if column not in row:
            return None
        label = _label_text(row[column], column, location)
        if self.classes is not None:
            return self.class_of(label, location)
        if (value := parse_number(label)) is None:
            hint = "Write one, such as 3.5; or take labels as classes: --set task.labels=null"
            raise DataError(str(location), f'"{label[:80]}" in the column "{column}" is no number', hint)
        return value

    def _classes_of(self, file: Path) -> tuple[str, ...]:
        """Return the labels of a file, sorted: as numbers if all of them are numbers, else by their text."""
        column = self.config.label
        if not file.exists() and not is_dataset(file):
            texts = ", ".join(f'"{text}"' for text in self.config.text)
            columns = f'{texts} (task.text) and "{column}" (task.label)'
            problem = "cannot be read (No such file or directory)"
            raise DataError(file, problem, f"Give a table with the columns {columns}: --set task.source=FILE")
        labels = ((location, field(row, column, location, "task.label")) for location, row in table_rows(file))
        names = {_label_text(label, column, location) for location, label in labels}
        if len(names) < 2:
            problem = f'{len(names)} labels in the column "{column}" ({", ".join(names)[:80]})'
            raise DataError(file, problem, "Give a file with two classes or more, or name them: task.labels")
        numbers = {label: value for label in names if (value := parse_number(label)) is not None}
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


class TextTable(OwnTable):
    """Texts and their answers: `task.text` names the column of the texts, `task.label` that of the answers."""

    name = "text_table"

    def __init__(self, config: TaskConfig):
        source, answer = names_of(config)
        metrics = (*ROUGE, "bleu", "chrf")
        super().__init__(config, Entry(files=(), text=(source,), label=answer, metrics=metrics, form="texts"))
