"""Your own tables: one or two columns of texts, and one of labels or answers."""

import json
from collections.abc import Iterator
from pathlib import Path

from megasparse.config.files import find_file
from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.catalog import Entry, RowTask, label_text
from megasparse.tasks.readers.rows import field, is_dataset, parse_number, table_rows
from megasparse.tasks.task import Example, split_name


class Table(RowTask):
    """A CSV file (quoted as in RFC 4180) or TSV file (no quoting) with column names in its first line, a file of JSON
    objects, one per line (.jsonl), or a Hugging Face dataset. The label column is optional.

    Labels are classes, given by their text (in JSON, numbers, true and false too); or numbers to predict, if
    task.labels is []; or the answers of `text_table`. An empty class or number is an error.
    """

    source_is_file = True

    def __init__(self, config: TaskConfig, entry: Entry):
        """Read the labels of the training file if task.labels is null. Raises DataError too."""
        super().__init__(config, entry)
        labels = config.labels
        if self.form == "texts":
            return
        if labels == []:
            self.metrics = ("pearson", "spearman")
            return
        if labels is not None and (len(set(labels)) < len(labels) or len(labels) < 2):
            hint = "List two classes or more, each once; [] predicts numbers, null uses the training file's classes"
            raise ConfigError("task.labels", f"{json.dumps(labels, ensure_ascii=False)[:80]} is not valid", hint)
        self.classes = tuple(labels) if labels is not None else self._classes_of(find_file(config.source))
        self.config = config.model_copy(update={"labels": list(self.classes)})
        numbers = [parse_number(label) for label in self.classes]
        if None not in numbers and any(value != int(value or 0) for value in numbers):
            title = f'warning: the {len(numbers)} real numbers in the column "{config.label}" are treated as classes'
            self.warnings = [f"{title}: task.labels=[] predicts numbers"]

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return super().files(folder) or {"train": [folder]}

    def read(self, file: Path) -> Iterator[Example]:
        path, part = split_name(file)
        rows = table_rows(path, part) if is_dataset(path) else table_rows(file)
        for index, (location, row) in enumerate(rows):
            yield self.example(row, location, str(index))

    def _classes_of(self, file: Path) -> tuple[str, ...]:
        """Return the labels in a file, sorted by number if all are numbers, else by text."""
        column = self.config.label
        if not file.exists() and not is_dataset(file):
            texts = ", ".join(f'"{text}"' for text in self.config.text)
            columns = f'{texts} (task.text) and "{column}" (task.label)'
            problem = "cannot be read (No such file or directory)"
            raise DataError(file, problem, f"Use a table with the columns {columns}: --set task.source=FILE")
        labels = ((location, field(row, column, location, "task.label")) for location, row in table_rows(file))
        names = {label_text(label, column, location) for location, label in labels}
        if len(names) < 2:
            problem = f'{len(names)} labels in the column "{column}" ({", ".join(names)[:80]})'
            raise DataError(file, problem, "Use a file with two classes or more, or list them in task.labels")
        numbers = {label: value for label in names if (value := parse_number(label)) is not None}
        ranks = numbers if len(numbers) == len(names) else dict.fromkeys(names, 0.0)
        return tuple(sorted(names, key=lambda label: (ranks[label], label)))
