"""One's own texts and their answers: a table with a column of each."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks.readers.table import table_rows, text_of
from megasparse.tasks.readers.text_task import ROUGE, TextTask, names_of
from megasparse.tasks.task import Example


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
