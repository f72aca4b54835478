"""IMDB's ratings in the forms of the two releases."""

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import DataError
from megasparse.tasks import build_task

TEXT = (
    "ur0012\t\ttt0111161\t\t10\t\ti loved it ! <sssss> really . <sssss> see it\n"
    "ur7\t\ttt1\t\t1\t\tno\u2028good\tat all\t\tnone <sssss> \n"
)


@pytest.fixture
def task():
    return build_task(TaskConfig(name="imdb"))


@pytest.mark.parametrize("mark", [".", "-"])
def test_splits_are_the_released_files(task, tmp_path, mark):
    for name in ("train", "dev", "test"):
        (tmp_path / f"imdb{mark}{name}.txt.ss").write_text(TEXT, encoding="utf-8")
    assert {split: [file.name for file in files] for split, files in task.files(tmp_path).items()} == {
        "train": [f"imdb{mark}train.txt.ss"],
        "validation": [f"imdb{mark}dev.txt.ss"],
        "test": [f"imdb{mark}test.txt.ss"],
    }
    (tmp_path / f"imdb{mark}dev.txt.ss").unlink()
    assert list(task.files(tmp_path)) == ["train", "test"]


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


@pytest.mark.parametrize("rating", ["0", "11", "7.5", "", "05", "10 "])
def test_another_rating_is_refused(task, tmp_path, rating):
    file = tmp_path / "a.ss"
    file.write_text(f"u\t\tp\t\t{rating}\t\tgood\n")
    with pytest.raises(DataError, match=rf'a\.ss:1: "{rating}" is no label of imdb.*Its labels are: 1, 2, 3'):
        list(task.read(file))


@pytest.mark.parametrize("line", ["", "u\tp\t10\tgood", "u\t\tp\t\t10"])
def test_a_row_of_another_form_is_refused(task, tmp_path, line):
    file = tmp_path / "a.ss"
    file.write_text(TEXT + line + "\n", encoding="utf-8")
    with pytest.raises(
        DataError, match=r"a\.ss:3: [13] fields where there are 4 columns \(user, product, rating, text\)"
    ):
        list(task.read(file))
