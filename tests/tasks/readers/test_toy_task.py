"""A task defined only in this file, one row of the catalog, as CONTRIBUTING.md describes; a run learns it."""

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks.catalog import TASKS, Entry, build_task
from megasparse.tasks.run import read_files
from megasparse.tasks.task import split_files
from tests.helpers.finetuning import ENCODER, launch

SHOUTING = Entry(
    files=({"train": "train.csv", "validation": "dev.csv"},), rows="comma_separated()", text=("line",), label="mood",
    classes=("calm", "loud"),
)  # fmt: skip


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setitem(TASKS, "shouting", SHOUTING)
    for name, count in (("train.csv", 64), ("dev.csv", 16)):
        words = [f"word {number} of many" for number in range(count)]
        lines = [f"loud,{word.upper()}" if number % 2 else f"calm,{word}" for number, word in enumerate(words)]
        (tmp_path / name).write_text("\n".join(["mood,line", *lines]) + "\n")
    return tmp_path


def test_it_is_read_and_learned(folder):
    shouting = build_task(TaskConfig(name="shouting"))
    examples = list(read_files(shouting, split_files(shouting, folder, "validation")))
    assert [(x.inputs, x.label) for x in examples[:2]] == [(("word 0 of many",), 0), (("WORD 1 OF MANY",), 1)]
    task = {"name": "shouting", "source": str(folder), "max_length": 32}
    model, training = {**ENCODER, "dropout": 0.0}, {"steps": 30}
    lines = launch(folder / "run", folder, task=task, model=model, head={"dropout": 0.0}, training=training)
    assert lines[-1]["evaluation/accuracy"] == 1.0
