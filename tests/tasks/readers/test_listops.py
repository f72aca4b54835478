from pathlib import Path

import numpy as np
import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks import build_task

TREE = "( ( ( ( [MED 3 ) ( ( ( [SM 4 ) 9 ) ] ) ) 8 ) ] )"


@pytest.fixture
def task():
    return build_task(TaskConfig(name="listops"))


def written(
    folder: Path, *rows: str, name: str = "basic_train.tsv", end: str = "\n", header: str = "Source\tTarget"
) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes("".join(row + end for row in (header, *rows)).encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])  # the official generator writes the latter
def test_a_tree_is_read_without_its_parentheses(task, tmp_path, end):
    first, second = task.read(written(tmp_path, f"{TREE}\t3", "( ( ( [MIN 0 ) 7 ) ] )\t0", end=end))
    # digits are themselves; [MIN, [MAX, [MED, [SM are 10 … 13, and ] is 14
    assert first.inputs[0].tolist() == [12, 3, 13, 4, 9, 14, 8, 14] and first.inputs[0].dtype == np.int64
    assert second.inputs[0].tolist() == [10, 0, 7, 14]
    assert (first.label, first.name, first.location.line) == (3, "0", 2)
    assert (second.label, second.name, str(second.location)) == (0, "1", f"{tmp_path}/basic_train.tsv:3")
    assert task.vocabulary == 15 and task.classes == tuple("0123456789") and task.metrics == ("accuracy",)
