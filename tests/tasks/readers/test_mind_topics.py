"""Topics of MIND's news in the form of news.tsv."""

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import DataError
from megasparse.tasks import build_task
from megasparse.tasks.task import split_files

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


@pytest.mark.parametrize("inner", ["MINDlarge_train", "MINDsmall_train", ""])
def test_of_ten_articles_eight_train_and_every_split_is_apart(task, tmp_path, inner):
    for name in {inner, "MINDlarge_dev"}:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "news.tsv").write_text("".join(row(f"N{n}", "news", f"title {n}", "") for n in range(25)))
    splits = {}
    for split in ("train", "validation", "test"):
        (file,) = split_files(task, tmp_path, split)
        found = list(task.read(file))
        assert {example.location.file for example in found} == {tmp_path / inner / "news.tsv"}
        assert [example.location.line for example in found] == [int(example.name[1:]) + 1 for example in found]
        splits[split] = [int(example.name[1:]) for example in found]
    assert splits["test"] == [0, 10, 20] and splits["validation"] == [1, 11, 21]
    assert splits["train"] == [n for n in range(25) if n % 10 > 1]


def test_another_category_and_another_form_are_refused(task, tmp_path):
    file = tmp_path / "news.tsv"
    file.write_text(row("N1", "news", "a", "b") + row("N2", "sport", "a", "b"))
    with pytest.raises(DataError, match=r'news\.tsv:2: "sport" is no label of mind_topics. Did you mean "sports"\?'):
        list(task.read(file))
    file.write_text("N1\tnews\ta title\n")
    with pytest.raises(DataError, match=r"news\.tsv:1: 3 fields where there are 8 columns \(id, category"):
        list(task.read(file))
