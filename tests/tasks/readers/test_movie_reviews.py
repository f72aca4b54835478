"""Polarity of whole reviews in the form of the polarity data set 2.0."""

import pytest

from megasparse.tasks.task import split_files

NUMBERS = (0, 99, 700, 799, 800, 899, 900, 999)


def make(root):
    for name in ("neg", "pos"):
        (root / name).mkdir(parents=True)
        for n in NUMBERS:
            (root / name / f"cv{n:03}_{29000 + n}.txt").write_text(f"{name} film {n} .\nof two lines . \n")
    (root / "README").write_text("about it")


@pytest.mark.parametrize("inner", ["", "txt_sentoken", "movie_reviews"])
def test_splits_are_the_official_folds(task, tmp_path, inner):
    make(tmp_path / inner)
    expected = {"train": (0, 99, 700, 799), "validation": (800, 899), "test": (900, 999)}
    for split, numbers in expected.items():
        files = split_files(task, tmp_path, split)
        assert files == [
            tmp_path / inner / name / f"cv{n:03}_{29000 + n}.txt" for name in ("neg", "pos") for n in numbers
        ]
        for file in files:
            (example,) = task.read(file)
            name, number = file.parent.name, int(file.stem[2:5])
            assert example.inputs == (f"{name} film {number} .\nof two lines . \n",)
            assert task.classes[example.label] == name and example.name == file.stem
            assert str(example.location) == str(file)


def test_a_review_elsewhere_has_no_label(task, tmp_path):
    (tmp_path / "mine.txt").write_text("good")
    (example,) = task.read(tmp_path / "mine.txt")
    assert (example.inputs, example.label, example.name) == (("good",), None, "mine")
