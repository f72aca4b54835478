"""A task that exists in this file alone, added as CONTRIBUTING.md describes: a run learns it."""

import sys
from types import ModuleType
from typing import ClassVar

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import DataError
from megasparse.tasks import TASK_MODULES, build_task
from megasparse.tasks.run import read_files
from megasparse.tasks.task import Example, SourceLocation, Task, split_files
from tests.helpers.finetuning import ENCODER, launch


class Shouting(Task):
    """Whether a line is written in capitals: files of a label, a tabulator and a text."""

    name = "shouting"
    classes = ("calm", "loud")
    metrics = ("accuracy",)
    official: ClassVar = {"train": "train.tsv", "validation": "dev.tsv"}

    def read(self, file):
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            location = SourceLocation(file, number)
            label, tab, text = line.partition("\t")
            if not tab:
                raise DataError(str(location), "no tabulator", "Write LABEL, a tabulator, TEXT")
            yield Example((text,), self.class_of(label, location), location, str(number))


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Official files; the module that a file megasparse/tasks/readers/shouting.py would be, and its line."""
    module = ModuleType("shouting")
    module.Shouting = Shouting
    monkeypatch.setitem(sys.modules, "megasparse.tasks.readers.shouting", module)
    monkeypatch.setitem(TASK_MODULES, "shouting", "shouting")
    for name, count in (("train.tsv", 64), ("dev.tsv", 16)):
        words = [f"word {number} of many" for number in range(count)]
        lines = [f"loud\t{word.upper()}" if number % 2 else f"calm\t{word}" for number, word in enumerate(words)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return tmp_path


def test_it_is_read_and_learned(folder):
    shouting = build_task(TaskConfig(name="shouting"))
    examples = list(read_files(shouting, split_files(shouting, folder, "validation")))
    assert [(x.inputs, x.label) for x in examples[:2]] == [(("word 0 of many",), 0), (("WORD 1 OF MANY",), 1)]
    task = {"name": "shouting", "source": str(folder), "max_length": 32}
    model, training = {**ENCODER, "dropout": 0.0}, {"steps": 30}
    lines = launch(folder / "run", folder, task=task, model=model, head={"dropout": 0.0}, training=training)
    assert lines[-1]["evaluation/accuracy"] == 1.0
