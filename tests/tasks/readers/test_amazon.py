"""Amazon's reviews of electronics in the form of the official file."""

import gzip
import json

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import DataError
from megasparse.tasks import build_task
from megasparse.tasks.task import split_files

STARS = [5.0, 1.0, 3.0, 4.0, 2.0]


def review(number):
    return {
        "reviewerID": f"A{number}",
        "asin": "0528881469",
        "reviewerName": "",
        "helpful": [0, 0],
        "reviewText": f'Review {number}, "\u2028" & more.',
        "overall": STARS[number % 5],
        "summary": "not to be read",
        "unixReviewTime": 1370131200,
        "reviewTime": "06 2, 2013",
    }


@pytest.fixture
def folder(tmp_path):
    text = "".join(json.dumps(review(n)) + "\n" for n in range(50))
    (tmp_path / "reviews_Electronics_5.json").write_text(text, encoding="utf-8")
    return tmp_path


def test_a_text_is_the_review_and_a_class_its_stars(task, folder):
    found = list(task.read(folder / "reviews_Electronics_5.json"))
    assert [example.inputs for example in found] == [(review(n)["reviewText"],) for n in range(50)]
    assert [float(task.classes[example.label]) for example in found] == STARS * 10
    assert [example.name for example in found] == [str(n) for n in range(50)]
    assert str(found[7].location) == f"{folder / 'reviews_Electronics_5.json'}:8"


def test_the_compressed_file_reads_the_same(task, folder):
    plain = folder / "reviews_Electronics_5.json"
    before = [list(map(lambda each: (each.inputs, each.label), task.read(f))) for f in task.files(folder)["train"]]
    (folder / "reviews_Electronics_5.json.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    (file,) = task.files(folder)["train"]
    found = list(task.read(file))
    assert [[(each.inputs, each.label) for each in found]] == before
    assert str(found[0].location) == f"{folder / 'reviews_Electronics_5.json.gz'}:3"


@pytest.mark.parametrize("stars", [0.0, 6.0, 4.5, "5.0", None, True, [5], 10**400])
def test_another_number_of_stars_is_refused(task, folder, stars):
    file = folder / "other.json"
    file.write_text(json.dumps(review(0)) + "\n" + json.dumps(review(1) | {"overall": stars}) + "\n")
    with pytest.raises(DataError, match=r"other\.json:2: overall is .*no number of stars. Write 1\.0, 2\.0"):
        list(task.read(file))


def test_a_review_without_a_text_is_refused_and_an_empty_one_is_read(task, folder):
    file, row = folder / "other.json", review(0)
    file.write_text(json.dumps(row | {"reviewText": ""}) + "\n" + json.dumps(row | {"reviewText": None}))
    examples = task.read(file)
    assert next(examples).inputs == ("",)
    with pytest.raises(DataError, match=r"other\.json:2: reviewText is no text"):
        next(examples)
    del row["reviewText"]
    file.write_text(json.dumps(row))
    with pytest.raises(DataError, match=r'other\.json:1: has no column "reviewText"'):
        list(task.read(file))


def test_the_sample_is_every_33rd_review_in_parts_of_eight_one_and_one(tmp_path, monkeypatch):
    rows = (json.dumps({"reviewText": f"text {n}", "overall": 1.0}) for n in range(33 * 25))
    (tmp_path / "reviews_Electronics_5.json").write_text("\n".join(rows))
    task = build_task(TaskConfig(name="amazon_50k"))
    monkeypatch.setattr(type(task), "most", 20)
    splits = ("train", "validation", "test")
    found = {s: [int(e.name) for f in split_files(task, tmp_path, s) for e in task.read(f)] for s in splits}
    train = [33 * n for n in range(20) if n % 10 > 1]
    assert found == {"train": train, "validation": [33, 363], "test": [0, 330]}
