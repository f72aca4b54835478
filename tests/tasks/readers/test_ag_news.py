"""AG's news in the form of its official files."""

import csv

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks import build_task

ROWS = [
    ("3", "Bears return (Reuters)", "Reuters - A dwindling\\band of sellers is back."),
    ("4", 'A "quoted" title', 'It said \\"no" , twice.'),
    ("1", "Talks, again", "AP - It is the firm #39;s first."),
    ("2", "Late\u2028goal", ""),
]


@pytest.fixture
def task():
    return build_task(TaskConfig(name="ag_news"))


@pytest.fixture
def folder(tmp_path):
    for name in ("train.csv", "test.csv"):
        with open(tmp_path / name, "w", encoding="utf-8", newline="") as stream:
            csv.writer(stream, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(ROWS)
    return tmp_path


def test_an_example_is_title_and_description_as_they_stand(task, folder):
    found = list(task.read(folder / "train.csv"))
    assert [example.inputs for example in found] == [(f"{title} {text}",) for _, title, text in ROWS]
    assert [task.classes[example.label] for example in found] == ["Business", "Sci/Tech", "World", "Sports"]
    assert [(str(example.location), example.name) for example in found] == [
        (f"{folder / 'train.csv'}:{n + 1}", str(n)) for n in range(4)
    ]
    assert task.metrics == ("accuracy", "macro_f1")
