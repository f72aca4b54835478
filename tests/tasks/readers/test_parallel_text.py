"""Line-aligned files: which are read, in which pairs, and what is refused."""

import gzip

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError
from megasparse.tasks import build_task
from megasparse.tasks.task import split_files
from tests.helpers.refusals import refusal

ENGLISH = ["A dog runs .", "Two  men\u2028sit\x0btoo.", " “Hi”, she said. "]
GERMAN = ["Ein Hund rennt .", "Zwei Männer\u2028sitzen\x0bauch.", "„Hallo“, sagte sie.\r"]


def task_of(name="parallel_text", text=("en",), label="de"):
    return build_task(TaskConfig(name=name, text=list(text), label=label))


def write(file, rows):
    content = "".join(f"{row}\n" for row in rows).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


def pair(folder, stem, end="", number=3):
    """Write both sides of a split; each line names its side."""
    write(folder / f"{stem}.en{end}", [f"{stem} en {n}" for n in range(number)])
    write(folder / f"{stem}.de{end}", [f"{stem} de {n}" for n in range(number)])


@pytest.mark.parametrize("ends", [("", ""), (".gz", ".gz"), ("", ".gz"), (".gz", "")])
def test_lines_of_both_files_belong_together(tmp_path, ends):
    file = write(tmp_path / f"mine.en{ends[0]}", ENGLISH)
    write(tmp_path / f"mine.de{ends[1]}", GERMAN)
    found = list(task_of().read(file))
    assert [example.inputs for example in found] == [(line.strip(),) for line in ENGLISH]
    assert [example.label for example in found] == [line.strip() for line in GERMAN]
    assert [(str(each.location), each.name) for each in found] == [(f"{file}:{n + 1}", str(n)) for n in range(3)]


def test_the_direction_is_what_the_configuration_says(tmp_path):
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
        assert [(each.inputs[0], each.label) for each in task.read(file)] == [
            (f"{stem} en {n}", f"{stem} de {n}") for n in range(3)
        ]


def test_of_several_test_files_each_is_a_split_of_its_name(tmp_path):
    for stem in ("test_2016_flickr", "test_2017_mscoco"):
        pair(tmp_path, stem)
    assert set(task_of().files(tmp_path)) == {"test_2016_flickr", "test_2017_mscoco"}
    assert '"test" split' in refusal(lambda: split_files(task_of(), tmp_path, "test"))
    pair(tmp_path, "test")
    assert [file.name for file in split_files(task_of(), tmp_path, "test")] == ["test.en"]


def test_wmt14_is_validated_on_2013_and_tested_on_2014(tmp_path):
    for stem in ("train", "newstest2012", "newstest2013", "newstest2014"):
        pair(tmp_path, stem)
    task = task_of("wmt14")
    names = {split: file.name for split, (file,) in task.files(tmp_path).items()}
    assert names == {"train": "train.en", "validation": "newstest2013.en", "test": "newstest2014.en"}
    assert task.metrics[0] == "bleu" and task.form == "texts"


@pytest.mark.parametrize("name", ["new.en", "new.txt", "new"])
def test_a_file_alone_has_no_labels(tmp_path, name):
    file = write(tmp_path / name, ENGLISH)
    write(tmp_path / "other.de", GERMAN)
    found = list(task_of().read(file))
    assert [example.label for example in found] == [None] * 3
    assert found[2].inputs == (ENGLISH[2].strip(),) and str(found[2].location) == f"{file}:3"


def test_empty_lines_stay_where_they_are(tmp_path):
    """The form refuses them; a line left out here would move all that follow."""
    file = write(tmp_path / "a.en", ["one", "", "three"])
    write(tmp_path / "a.de", ["eins", "zwei", " "])
    assert [(each.inputs[0], each.label) for each in task_of().read(file)] == [
        ("one", "eins"), ("", "zwei"), ("three", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), [(3, 5), (5, 3), (0, 2), (1200, 1)])
def test_files_of_unequal_length_are_refused_naming_both(tmp_path, left, right):
    file = write(tmp_path / "a.en", ["x"] * left)
    other = write(tmp_path / "a.de", ["y"] * right)
    assert refusal(lambda: task_of().read(file)).startswith(f"{file}: {left:,} lines, and {other} has {right:,}. Give")


@pytest.mark.parametrize("bad", ["en", "de"])
def test_what_is_no_utf_8_is_refused(tmp_path, bad):
    for side in ("en", "de"):
        (tmp_path / f"a.{side}").write_bytes("eins\nzwölf\n".encode("latin-1" if side == bad else "utf-8"))
    message = refusal(lambda: task_of().read(tmp_path / "a.en"))
    assert message.startswith(f"{tmp_path / f'a.{bad}'}:2: is no UTF-8 (byte 0xf6 in column 3)")


def test_the_targets_own_file_is_refused(tmp_path):
    for end in ("", ".gz"):
        pair(tmp_path, "a", end)
        message = refusal(lambda end=end: task_of().read(tmp_path / f"a.de{end}"))
        assert message.startswith(f'{tmp_path / f"a.de{end}"}: has the suffix of the target, task.label = "de". Give')


def test_two_files_of_one_split_are_refused(tmp_path):
    pair(tmp_path, "val"), pair(tmp_path, "dev")
    message = refusal(lambda: task_of().files(tmp_path))
    assert message == f"{tmp_path}: dev.en and val.en are both its validation split. Keep one of them there"
    (tmp_path / "dev.en").unlink()
    write(tmp_path / "val.en.gz", ["x"])
    assert "val.en and val.en.gz are both" in refusal(lambda: task_of().files(tmp_path))


@pytest.mark.parametrize("stem", ["train", "val"])
def test_training_and_validation_files_need_their_translations(tmp_path, stem):
    file = write(tmp_path / f"{stem}.en", ENGLISH)
    assert refusal(lambda: task_of().files(tmp_path)).startswith(f"{file}: has no {stem}.de beside it. Put it there")


def test_a_folder_without_such_files_is_refused(tmp_path):
    pair(tmp_path, "train")
    for task, names in ((task_of(text=["fr"]), "train.fr or val.fr"), (task_of("wmt14", ["cs"]), "newstest2013.cs")):
        message = refusal(lambda task=task: split_files(task, tmp_path, "train"))
        assert names in message and message.endswith('--set task.text=["en"] --set task.label=de')
    assert "no such folder" in refusal(lambda: split_files(task_of(), tmp_path / "none", "train"))
    assert "cannot be read" in refusal(lambda: task_of().read(tmp_path / "none.en"))


@pytest.mark.parametrize("name", ["parallel_text", "wmt14", "text_table"])
def test_names_that_are_no_pair_are_refused(name):
    message = refusal(lambda: task_of(name, ["en", "fr"]), ConfigError)
    assert message == f'task.text: 2 names, and "{name}" reads one text. Give one: task.text=["NAME"]'
    assert refusal(lambda: task_of(name, ["en"], "en"), ConfigError).startswith('task.label: "en" is task.text too')
