"""Line-aligned files: the files read, their pairs, and rejected files."""

import gzip

import pytest
from datasets import Dataset, DatasetDict

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError
from megasparse.tasks.catalog import build_task
from megasparse.tasks.task import split_files
from tests.helpers.commands import refusal

ENGLISH = ["A dog runs .", "Two  men\u2028sit\x0btoo.", " “Hi”, she said. "]
GERMAN = ["Ein Hund rennt .", "Zwei Männer\u2028sitzen\x0bauch.", "„Hallo“, sagte sie.\r"]


def task_of(name="parallel_text", text=("en",), label="de"):
    return build_task(TaskConfig(name=name, text=list(text), label=label))


def write(file, rows):
    content = "".join(f"{row}\n" for row in rows).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


def pair(folder, stem, end="", number=3):
    write(folder / f"{stem}.en{end}", [f"{stem} en {n}" for n in range(number)])
    write(folder / f"{stem}.de{end}", [f"{stem} de {n}" for n in range(number)])


@pytest.mark.parametrize("ends", [("", ""), (".gz", ".gz"), ("", ".gz"), (".gz", "")])
def test_lines_of_both_files_belong_together(tmp_path, ends):
    file = write(tmp_path / f"mine.en{ends[0]}", ENGLISH)
    write(tmp_path / f"mine.de{ends[1]}", GERMAN)
    result = list(task_of().read(file))
    assert [example.inputs for example in result] == [(line.strip(),) for line in ENGLISH]
    assert [example.label for example in result] == [line.strip() for line in GERMAN]
    assert [(str(each.location), each.name) for each in result] == [(f"{file}:{n + 1}", str(n)) for n in range(3)]


def test_the_configuration_sets_the_direction(tmp_path):
    write(tmp_path / "train.en", ENGLISH), write(tmp_path / "train.de", GERMAN)
    task = task_of(text=["de"], label="en")
    (file,) = split_files(task, tmp_path, "train")
    assert file.name == "train.de"
    assert next((each.inputs[0], each.label) for each in task.read(file)) == (GERMAN[0], ENGLISH[0])


@pytest.mark.parametrize("validation", ["val", "valid", "dev"])
@pytest.mark.parametrize(("test", "end"), [("test", ""), ("test_2016_flickr", ".gz"), ("test.2016", "")])
def test_the_splits_of_a_folder(tmp_path, validation, test, end):
    for stem in ("train", validation, test, "train.more", "newstest2014"):
        pair(tmp_path, stem, end)
    write(tmp_path / f"test_other.fr{end}", ["x"])
    (tmp_path / "README").write_text("none of them")
    task = task_of()
    names = {split: [file.name for file in files] for split, files in task.files(tmp_path).items()}
    stems = {"train": "train", "validation": validation, "test": test}
    assert names == {split: [f"{stem}.en{end}"] for split, stem in stems.items()}
    for split, stem in stems.items():
        (file,) = split_files(task, tmp_path, split)
        pairs = [(f"{stem} en {n}", f"{stem} de {n}") for n in range(3)]
        assert [(each.inputs[0], each.label) for each in task.read(file)] == pairs


def test_wmt14_is_validated_on_2013_and_tested_on_2014(tmp_path):
    for stem in ("train", "newstest2012", "newstest2013", "newstest2014"):
        pair(tmp_path, stem)
    task = task_of("wmt14")
    names = {split: file.name for split, (file,) in task.files(tmp_path).items()}
    assert names == {"train": "train.en", "validation": "newstest2013.en", "test": "newstest2014.en"}
    assert task.metrics[0] == "bleu" and task.form == "texts"


@pytest.mark.parametrize("name", ["new.en", "new.txt", "new"])
def test_a_single_file_has_no_labels(tmp_path, name):
    file = write(tmp_path / name, ENGLISH)
    write(tmp_path / "other.de", GERMAN)
    result = list(task_of().read(file))
    assert [example.label for example in result] == [None] * 3
    assert result[2].inputs == (ENGLISH[2].strip(),) and str(result[2].location) == f"{file}:3"


@pytest.mark.parametrize(("left", "right"), [(3, 5), (5, 3), (0, 2), (1200, 1)])
def test_files_of_unequal_length_are_rejected_naming_both(tmp_path, left, right):
    file = write(tmp_path / "a.en", ["x"] * left)
    other = write(tmp_path / "a.de", ["y"] * right)
    assert refusal(lambda: task_of().read(file)).startswith(f"{file}: {left:,} lines, but {right:,} in {other}. Use")


def test_a_folder_without_such_files_is_rejected(tmp_path):
    pair(tmp_path, "train")
    for task, names in ((task_of(text=["fr"]), "train.fr or val.fr"), (task_of("wmt14", ["cs"]), "newstest2013.cs")):
        message = refusal(lambda task=task: split_files(task, tmp_path, "train"))
        assert names in message and message.endswith('--set task.text=["en"] --set task.label=de')
    assert "no such folder" in refusal(lambda: split_files(task_of(), tmp_path / "none", "train"))
    assert "cannot be read" in refusal(lambda: task_of().read(tmp_path / "none.en"))


@pytest.mark.parametrize("name", ["parallel_text", "wmt14", "text_table"])
def test_unsuitable_column_names_are_rejected(name):
    message = refusal(lambda: task_of(name, ["en", "fr"]), ConfigError)
    assert message == f'task.text: 2 names, but "{name}" reads one text. Use one: task.text=["NAME"]'
    assert refusal(lambda: task_of(name, ["en"], "en"), ConfigError).startswith('task.label: "en" is also task.text')


def test_summaries_are_a_line_a_story(tmp_path):
    task = task_of("cnn_dm")
    for name in ("train", "val", "test"):
        (tmp_path / f"{name}.source").write_text(f"{name} one .\n{name} two .\n")
        (tmp_path / f"{name}.target").write_text("summary one .\nsummary two .\n")
    assert set(task.files(tmp_path)) == {"train", "validation", "test"}
    (file,) = split_files(task, tmp_path, "validation")
    result = [(example.inputs[0], example.label) for example in task.read(file)]
    assert result == [("val one .", "summary one ."), ("val two .", "summary two .")]
    (tmp_path / "val.target").write_text("summary one .\n")
    assert "2 lines, but 1 in" in refusal(lambda: task.read(file))


@pytest.mark.parametrize("nested", [False, True])
def test_a_dataset_of_translations_is_read_by_its_columns(tmp_path, nested):
    pairs = [{"en": "a dog", "de": "ein Hund"}, {"en": "two men", "de": "zwei Männer"}]
    data = Dataset.from_list([{"translation": pair} for pair in pairs] if nested else pairs)
    DatasetDict(train=data, validation=data, test=data).save_to_disk(str(tmp_path / "data"))
    task = task_of("wmt14" if nested else "parallel_text", ["de"], "en")
    (file,) = task.files(tmp_path / "data")["test"]
    assert [(x.inputs, x.label) for x in task.read(file)] == [((pair["de"],), pair["en"]) for pair in pairs]
