from pathlib import Path

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import DataError
from megasparse.tasks import build_task
from megasparse.tasks.task import Task, split_files


@pytest.fixture
def task() -> Task:
    return build_task(TaskConfig(name="aan"))


def test_a_pair_is_read_as_it_stands(task: Task, tmp_path: Path) -> None:
    # A text is what Python shows of bytes; its escapes stay, and a quotation mark is no quotation.
    path = tmp_path / "new_aan_pairs.train.tsv"
    texts = ("b'Parsing \\xe2\\x80\\x93 a survey\\n1 Introduction'", 'b"It\'s \\"quoted"')
    path.write_text(f"1.0\tP05-1022\tW04-0301\t{texts[0]}\t{texts[1]}\n0\tA00\tB11\t\"b''\tb'y'\n", encoding="utf-8")
    first, second = task.read(path)
    assert first.inputs == texts
    assert r"\xe2\x80\x93" in first.inputs[0] and r"\n1 Intro" in first.inputs[0]
    assert (first.label, first.name, str(first.location)) == (1, "P05-1022 W04-0301", f"{path}:1")
    assert (second.label, second.inputs, second.location.line) == (0, ("\"b''", "b'y'"), 2)
    assert task.towers and task.vocabulary is None and task.metrics == ("accuracy",)


def test_the_official_files_are_the_splits(task: Task, tmp_path: Path) -> None:
    for name in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("0\ta\tb\tx\ty\n")
    assert split_files(task, tmp_path, "validation") == [tmp_path / "new_aan_pairs.eval.tsv"]
    assert list(task.files(tmp_path)) == ["train", "validation", "test"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("0\ta\tb\tx", r"pairs\.tsv:2: 4 fields where there are 5 columns \(label, id1, id2, text1, text2\)"),
        ("2.0\ta\tb\tx\ty", r'pairs\.tsv:2: "2\.0" is no label of aan.*0, 1'),
        ("label\tid1\tid2\ttext1\ttext2", r':2: "label" is no label of aan'),
    ],
)
def test_what_is_no_pair_is_named(task: Task, tmp_path: Path, row: str, said: str) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text(f"1\ta\tb\tx\ty\n{row}\n")
    with pytest.raises(DataError, match=said):
        list(task.read(path))
