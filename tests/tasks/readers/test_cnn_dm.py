"""CNN/DailyMail in small files of its official forms."""

import hashlib

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks.catalog import build_task
from megasparse.tasks.task import split_files
from tests.helpers.refusals import refusal

TASK = build_task(TaskConfig(name="cnn_dm"))

STORY = """(CNN) -- A man was seen in a tree.

 "He is still there," an @highlight of the day said.

@highlight

A man sits in a tree

@highlight

Nobody knows why
"""
ARTICLE = '(CNN) -- A man was seen in a tree. "He is still there," an @highlight of the day said.'


def url(number):
    return f"http://web.archive.org/web/2015id_/http://www.cnn.com/2015/04/01/é/{number}.html"


def corpus(folder, lists, stories=("cnn/stories", "dailymail/stories")):
    """Six stories, of either paper in turn; two of each split, listed from the last to the first."""
    numbers = iter(range(6))
    for name in stories:
        (folder / name).mkdir(parents=True)
    lists.mkdir(exist_ok=True)
    for split in ("train", "val", "test"):
        two = [next(numbers), next(numbers)]
        for n in two:
            name = hashlib.sha1(url(n).encode()).hexdigest()
            (folder / stories[n % 2] / f"{name}.story").write_text(f"text {n}\n\n@highlight\n\nsummary {n}\n")
        (lists / f"all_{split}.txt").write_text("".join(f"{url(n)}\n" for n in reversed(two)))


def test_a_story_is_its_text_and_its_highlights(tmp_path):
    file = tmp_path / "ab12.story"
    file.write_text(STORY, encoding="utf-8")
    (found,) = TASK.read(file)
    assert found.inputs == (ARTICLE,) and found.label == "A man sits in a tree\nNobody knows why"
    assert (str(found.location), found.name) == (str(file), "ab12")


@pytest.mark.parametrize("inner", [".", "url_lists"])
@pytest.mark.parametrize(
    "stories", [("cnn/stories", "dailymail/stories"), ("cnn_stories_tokenized", "dm_stories_tokenized")]
)
def test_the_splits_are_those_of_the_lists(tmp_path, inner, stories):
    corpus(tmp_path, tmp_path / inner, stories)
    found = {}
    for split, (file,) in TASK.files(tmp_path).items():
        examples = list(TASK.read(file))
        found[split] = [(example.inputs[0], example.label) for example in examples]
        assert all(example.location.file.stem == example.name for example in examples)
    assert found == {
        "train": [("text 1", "summary 1"), ("text 0", "summary 0")],
        "validation": [("text 3", "summary 3"), ("text 2", "summary 2")],
        "test": [("text 5", "summary 5"), ("text 4", "summary 4")],
    }


def test_a_line_a_story(tmp_path):
    for name in ("train", "val", "test"):
        (tmp_path / f"{name}.source").write_text(f"{name} one .\n{name} two .\n")
        (tmp_path / f"{name}.target").write_text("summary one .\nsummary two .\n")
    assert set(TASK.files(tmp_path)) == {"train", "validation", "test"}
    (file,) = split_files(TASK, tmp_path, "validation")
    found = [(example.inputs[0], example.label) for example in TASK.read(file)]
    assert found == [("val one .", "summary one ."), ("val two .", "summary two .")]
    (tmp_path / "val.target").write_text("summary one .\n")
    assert "2 lines, and" in refusal(lambda: TASK.read(file))
