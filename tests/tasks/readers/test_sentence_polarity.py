"""Polarity of sentences in the form of rt-polarity.neg and rt-polarity.pos."""

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import DataError
from megasparse.tasks import build_task
from megasparse.tasks.task import split_files


@pytest.fixture
def task():
    return build_task(TaskConfig(name="sentence_polarity"))


@pytest.fixture
def folder(tmp_path):
    for name in ("neg", "pos"):
        text = "".join(f"{name} sentence {n} . \n" for n in range(23))
        (tmp_path / f"rt-polarity.{name}").write_text(text)
    return tmp_path


def test_splits_are_apart_of_both_files_and_together_all_of_them(task, folder):
    splits = {
        split: [example for file in split_files(task, folder, split) for example in task.read(file)]
        for split in ("train", "validation", "test")
    }
    assert [int(example.name) for example in splits["test"]] == [0, 10, 20] * 2
    assert [int(example.name) for example in splits["validation"]] == [1, 11, 21] * 2
    assert [int(example.name) for example in splits["train"]] == [n for n in range(23) if n % 10 > 1] * 2
    for examples in splits.values():
        for example in examples:
            name = task.classes[example.label]
            assert example.inputs == (f"{name} sentence {example.name} . ",)
            assert str(example.location) == f"{folder / f'rt-polarity.{name}'}:{int(example.name) + 1}"


def test_half_of_the_files_are_no_splits(task, folder):
    (folder / "rt-polarity.pos").unlink()
    assert task.files(folder) == {}


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_both_encodings_give_the_same_text(task, folder, encoding):
    file = folder / "rt-polarity.pos"
    sentences = ["un café \x85 à l'été .", "plain", "señor"]
    file.write_bytes("".join(f"{each}\r\n" for each in sentences).encode(encoding))
    assert [example.inputs[0] for example in task.read(file)] == sentences


def test_sentences_of_another_file_have_no_label(task, tmp_path):
    file = tmp_path / "new.txt"
    file.write_text("one\n\nthree")
    assert [(example.inputs, example.label) for example in task.read(file)] == [
        (("one",), None),
        (("",), None),
        (("three",), None),
    ]
    file.write_text("")
    assert list(task.read(file)) == []


def test_a_missing_file_is_refused(task, tmp_path):
    with pytest.raises(DataError, match=r"rt-polarity\.neg: cannot be read \(No such file"):
        list(task.read(tmp_path / "rt-polarity.neg#test"))
