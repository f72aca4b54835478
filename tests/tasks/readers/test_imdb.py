"""IMDB's ratings in the forms of the two releases."""

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks import build_task

TEXT = (
    "ur0012\t\ttt0111161\t\t10\t\ti loved it ! <sssss> really . <sssss> see it\n"
    "ur7\t\ttt1\t\t1\t\tno\u2028good\tat all\t\tnone <sssss> \n"
)


@pytest.fixture
def task():
    return build_task(TaskConfig(name="imdb"))


def test_a_text_has_spaces_between_its_sentences(task, tmp_path):
    file = tmp_path / "a.ss"
    file.write_text(TEXT, encoding="utf-8")
    found = list(task.read(file))
    assert [example.inputs for example in found] == [
        ("i loved it ! really . see it",),
        ("no\u2028good\tat all\t\tnone ",),
    ]
    assert [task.classes[example.label] for example in found] == ["10", "1"]
    assert [example.label for example in found] == [9, 0]
    assert [(str(example.location), example.name) for example in found] == [(f"{file}:1", "0"), (f"{file}:2", "1")]
