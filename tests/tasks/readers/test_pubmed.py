"""PubMed in small files of its official form."""

import json

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks import build_task
from tests.helpers.refusals import refusal

PAPER = {
    "article_id": "PMC3872579",
    "article_text": ["a recent study reports anxiety .", " it was done in 2009 . "],
    "abstract_text": ["<S> background : it is common . </S>", "<S> <S is no mark , p < 0.05 . </S>"],
    "labels": None,
    "section_names": ["introduction"],
    "sections": [["a recent study reports anxiety ."]],
}


@pytest.fixture
def task():
    return build_task(TaskConfig(name="pubmed"))


def write(file, *rows):
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_paper_is_its_sentences_and_its_abstract_a_sentence_a_line(task, tmp_path):
    file = write(tmp_path / "train.txt", {**PAPER, "article_id": "first"}, PAPER)
    found = list(task.read(file))
    assert [(str(each.location), each.name) for each in found] == [(f"{file}:1", "first"), (f"{file}:2", "PMC3872579")]
    assert found[1].inputs == ("a recent study reports anxiety . it was done in 2009 .",)
    assert found[1].label == "background : it is common .\n<S is no mark , p < 0.05 ."


def test_a_paper_without_abstract_has_no_label_and_an_empty_one_an_empty_label(task, tmp_path):
    new = {"article_text": ["one .", "two ."]}
    file = write(tmp_path / "new.txt", new, {**new, "abstract_text": []}, {"article_text": []})
    found = [(example.inputs[0], example.label, example.name) for example in task.read(file)]
    assert found == [("one . two .", None, "0"), ("one . two .", "", "1"), ("", None, "2")]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({**PAPER, "article_text": "one text"}, '"article_text" is no list of sentences'),
        ({**PAPER, "article_text": ["x", None]}, '"article_text" is no list of sentences'),
        ({**PAPER, "abstract_text": None}, '"abstract_text" is no list of sentences'),
        ({"article": ["x"]}, 'has no column "article_text"'),
        (["x"], "is no JSON object"),
    ],
)
def test_another_form_is_refused(task, tmp_path, row, problem):
    file = write(tmp_path / "train.txt", PAPER, row)
    assert refusal(lambda: task.read(file)).startswith(f"{file}:2: {problem}")
