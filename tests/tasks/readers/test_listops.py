from pathlib import Path

import numpy as np
import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import DataError
from megasparse.tasks import build_task
from megasparse.tasks.task import Task, split_files

TREE = "( ( ( ( [MED 3 ) ( ( ( [SM 4 ) 9 ) ] ) ) 8 ) ] )"


@pytest.fixture
def task() -> Task:
    return build_task(TaskConfig(name="listops"))


def written(
    folder: Path, *rows: str, name: str = "basic_train.tsv", end: str = "\n", header: str = "Source\tTarget"
) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes("".join(row + end for row in (header, *rows)).encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])  # the official generator writes the latter
def test_a_tree_is_read_without_its_parentheses(task: Task, tmp_path: Path, end: str) -> None:
    first, second = task.read(written(tmp_path, f"{TREE}\t3", "( ( ( [MIN 0 ) 7 ) ] )\t0", end=end))
    # digits are themselves; [MIN, [MAX, [MED, [SM are 10 … 13, and ] is 14
    assert first.inputs[0].tolist() == [12, 3, 13, 4, 9, 14, 8, 14] and first.inputs[0].dtype == np.int64
    assert second.inputs[0].tolist() == [10, 0, 7, 14]
    assert (first.label, first.name, first.location.line) == (3, "0", 2)
    assert (second.label, second.name, str(second.location)) == (0, "1", f"{tmp_path}/basic_train.tsv:3")
    assert task.vocabulary == 15 and task.classes == tuple("0123456789") and task.metrics == ("accuracy",)


def test_the_official_files_are_the_splits(task: Task, tmp_path: Path) -> None:
    for name in ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv"):
        written(tmp_path, f"{TREE}\t3", name=name)
    assert split_files(task, tmp_path, "validation") == [tmp_path / "basic_val.tsv"]
    assert list(task.files(tmp_path)) == ["train", "validation", "test"]
    (tmp_path / "basic_val.tsv").unlink()
    assert list(task.files(tmp_path)) == ["train", "test"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("( ( ( [FIRST 0 ) 7 ) ] )\t0", r"basic_train\.tsv:2: Source has \"\[FIRST\".*\[MIN \[MAX \[MED \[SM \]"),
        ("( ( ( [MIN 0 ) 12 ) ] )\t0", r":2: Source has \"12\""),
        ("( ( ( [MIN 0 ) 7 ) ] )\t10", r":2: \"10\" is no label of listops.*0, 1, 2"),
        ("( ( ( [MIN 0 ) 7 ) ] )", r":2: 1 fields where there are 2 columns"),
    ],
)
def test_what_is_no_example_is_named(task: Task, tmp_path: Path, row: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        list(task.read(written(tmp_path, row)))


def test_another_header_is_named(task: Task, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r':2: has no column "Target".*Did you mean "target"'):
        list(task.read(written(tmp_path, f"{TREE}\t3", header="Source\ttarget")))
