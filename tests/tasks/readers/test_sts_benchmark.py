"""The STS benchmark's own files, in small files of their form."""

from megasparse.config.finetuning import TaskConfig
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
