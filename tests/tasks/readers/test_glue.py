"""GLUE's files, in small files of the official form: what is read, and malformed rows named by file and line."""

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks import build_task
from tests.helpers.refusals import refusal


def task(name):
    return build_task(TaskConfig(name=name))


def write(folder, name, *rows, encoding="utf-8", end="\n"):
    """A file of rows, each a text, or fields to be joined by tabs."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [row if isinstance(row, str) else "\t".join(row) for row in rows]
    (folder / name).write_bytes("".join(text + end for text in texts).encode(encoding))
    return folder / name


def found(name, file):
    return [(example.inputs, example.label, example.name) for example in task(name).read(file)]


def problem(name, file):
    return refusal(lambda: task(name).read(file))


def test_mrpc_is_read_from_the_files_of_glue_or_of_microsoft(tmp_path):
    names = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
    rows = [names, ["1", "70", "71", 'He said "yes.', "He agreed."], ["0", "72", "73", "He left.", "She came."]]
    want = [(('He said "yes.', "He agreed."), 1, "0"), (("He left.", "She came."), 0, "1")]
    glue = write(tmp_path / "glue", "train.tsv", *rows)
    assert found("mrpc", glue) == want
    test = write(tmp_path / "glue", "test.tsv", ["index", *names[1:]], ["5", "1", "2", "He left.", "He went."])
    assert found("mrpc", test) == [(("He left.", "He went."), None, "5")]
    microsoft = tmp_path / "microsoft"
    original = write(microsoft, "msr_paraphrase_train.txt", *rows, encoding="utf-8-sig", end="\r\n")
    assert found("mrpc", original) == want
    write(microsoft, "msr_paraphrase_test.txt", *rows)
    files = {"train": [original], "test": [microsoft / "msr_paraphrase_test.txt"]}
    assert task("mrpc").files(microsoft) == files
    write(tmp_path / "glue", "msr_paraphrase_train.txt", *rows)
    assert task("mrpc").files(tmp_path / "glue") == {"train": [glue], "test": [test]}


QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
WHOLE = "7\t1\t2\tWhy?\tHow come?\t1"


@pytest.mark.parametrize("half", ["7\t1\t2\tWhy?\tHow come?", "Why?\t0", '"\t1', f"{WHOLE}\t0", ""])
def test_halves_of_pairs_in_qqp_are_skipped_and_named_within_the_limit(tmp_path, half, capsys):
    rows = [WHOLE.replace("7", str(number), 1) for number in range(198)]
    file = write(tmp_path, "train.tsv", QQP, *rows, half)
    assert [each[2] for each in found("qqp", file)] == [str(number) for number in range(198)]
    fields = len(half.split("\t"))
    printed = capsys.readouterr().err.splitlines()
    assert printed[0].startswith(f"skipped: {file}:200: {fields} fields where there are 6 columns (id, qid1, ")
    assert printed[1:] == [f"{file}: skipped 1 of 200 rows"]
    file = write(tmp_path, "train.tsv", QQP, half, *rows, half, half)
    assert problem("qqp", file).startswith(f"{file}: 3 of 202 rows are malformed, the first one: {file}:2: {fields} ")
    assert capsys.readouterr().err == ""
