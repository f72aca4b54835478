"""The STS benchmark's own files, in small files of their form."""

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import DataError
from megasparse.tasks import build_task

PLAIN = ["main-captions", "MSRvid", "2012test", "0001", "5.000", "A plane is taking off.", 'An "air plane.']
LICENSED = ["main-news", "answers", "2015", "12", "3.8", "Yes.", "No.", "Source one, licence", "Source two"]


def task():
    return build_task(TaskConfig(name="sts_benchmark"))


def write(file, *rows):
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join("\t".join(row) + "\n" for row in rows))
    return file


def test_rows_with_and_without_licences_are_read(tmp_path):
    file = write(tmp_path / "sts-dev.csv", PLAIN, LICENSED)
    first, second = task().read(file)
    assert (first.inputs, first.label, first.name) == (("A plane is taking off.", 'An "air plane.'), 5.0, "0")
    assert (second.inputs, second.label, second.name) == (("Yes.", "No."), 3.8, "1")
    assert str(second.location) == f"{file}:2"


@pytest.mark.parametrize("inner", ["", "stsbenchmark"])
def test_splits_are_the_official_files(tmp_path, inner):
    names = {"train": "sts-train.csv", "validation": "sts-dev.csv", "test": "sts-test.csv"}
    files = {split: [write(tmp_path / inner / name, PLAIN)] for split, name in names.items()}
    assert task().files(tmp_path) == files
    assert task().metrics == ("pearson", "spearman") and task().classes is None


@pytest.mark.parametrize(
    "row, problem",
    [
        (PLAIN[:6], "6 fields where there are 7"),
        (LICENSED[:8], "8 fields where there are 7"),
        ([*LICENSED, "more"], "10 fields where there are 7"),
        ([*PLAIN[:4], "5.5", *PLAIN[5:]], '"5.5" is no similarity from 0 to 5'),
        ([*PLAIN[:4], "much", *PLAIN[5:]], '"much" is no similarity from 0 to 5'),
    ],
)
def test_what_is_malformed_is_named_by_file_and_line(tmp_path, row, problem):
    file = write(tmp_path / "sts-train.csv", PLAIN, row)
    with pytest.raises(DataError) as caught:
        list(task().read(file))
    assert str(caught.value).startswith(f"{file}:2: {problem}")
