"""Topics of MIND's news in the form of news.tsv."""

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks import build_task

URL = "https://assets.msn.com/labs/mind/AAGH0ET.html"


def row(name, category, title, abstract):
    entity = '[{"Label": "A", "Type": "P", "WikidataId": "Q80976", "Confidence": 1.0, "OccurrenceOffsets": [48]}]'
    return "\t".join([name, category, "sub" + category, title, abstract, URL, entity, "[]"]) + "\n"


@pytest.fixture
def task():
    return build_task(TaskConfig(name="mind_topics"))


def test_there_are_eighteen_classes_in_order(task):
    assert len(task.classes) == len(set(task.classes)) == 18
    assert list(task.classes) == sorted(task.classes)


def test_an_article_is_title_and_abstract(task, tmp_path):
    file = tmp_path / "news.tsv"
    text = row("N55528", "lifestyle", 'The "Brands" they Swear By', "Shop, \u2028 now.") + row("N1", "tv", "Alone", "")
    file.write_text(text, encoding="utf-8")
    found = list(task.read(file))
    assert [example.inputs for example in found] == [('The "Brands" they Swear By Shop, \u2028 now.',), ("Alone",)]
    assert [task.classes[example.label] for example in found] == ["lifestyle", "tv"]
    assert [example.name for example in found] == ["N55528", "N1"]
    assert [str(example.location) for example in found] == [f"{file}:1", f"{file}:2"]
