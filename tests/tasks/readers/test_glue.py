"""GLUE's files, in small files of the official form: what is read, and malformed rows named by file and line."""

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks import build_task
from megasparse.tasks.task import split_files
from tests.helpers.refusals import refusal

MNLI_BEFORE = ["index", "promptID", "pairID", "genre"] + [
    f"sentence{number}_{parse}" for parse in ("binary_parse", "parse") for number in (1, 2)
]


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


def test_cola_has_four_columns_and_no_names_but_in_its_test_file(tmp_path):
    train = write(
        tmp_path,
        "train.tsv",
        ["gj04", "1", "", 'The cat "sat.'],
        ["gj04", "0", "*", "Cat the\u2028sat."],
    )
    assert found("cola", train) == [(('The cat "sat.',), 1, "0"), (("Cat the\u2028sat.",), 0, "1")]
    test = write(tmp_path, "test.tsv", ["index", "sentence"], ["0", "The dog ran."], ["17", "Ran dog."])
    assert found("cola", test) == [(("The dog ran.",), None, "0"), (("Ran dog.",), None, "17")]


def test_mnli_takes_the_gold_label_and_not_the_annotators(tmp_path):
    before = ["0", "1", "1e", "fiction", "(a)", "(b)", "(A)", "(B)"]
    columns = [*MNLI_BEFORE, "sentence1", "sentence2"]
    train = write(
        tmp_path,
        "train.tsv",
        [*columns, "label1", "gold_label"],
        [*before, "A man.", "A person.", "neutral", "entailment"],
        ["7", *before[1:], "A man.", "A cat.", "neutral", "contradiction"],
    )
    assert found("mnli", train) == [(("A man.", "A person."), 0, "0"), (("A man.", "A cat."), 2, "7")]
    annotators = [f"label{number}" for number in range(1, 6)]
    matched = write(
        tmp_path,
        "dev_matched.tsv",
        [*columns, *annotators, "gold_label"],
        [*before, "A man.", "A tall man.", "entailment", "neutral", "neutral", "entailment", "neutral", "neutral"],
    )
    assert found("mnli", matched) == [(("A man.", "A tall man."), 1, "0")]
    test = write(tmp_path, "test_mismatched.tsv", columns, [*before, "A man.", "A person."])
    assert found("mnli", test) == [(("A man.", "A person."), None, "0")]
    unsure = write(tmp_path, "unsure.tsv", [*columns, "gold_label"], [*before, "A man.", "A cat.", "-"])
    assert f'{unsure}:2: "-" is no label of mnli' in problem("mnli", unsure)
    names = {split: files[0].name for split, files in task("mnli").files(tmp_path).items()}
    assert names == {"train": "train.tsv", "validation": "dev_matched.tsv", "test_mismatched": "test_mismatched.tsv"}
    write(tmp_path, "dev_mismatched.tsv", columns)
    assert split_files(task("mnli"), tmp_path, "validation_mismatched") == [tmp_path / "dev_mismatched.tsv"]


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


@pytest.mark.parametrize(
    "row, fields",
    [
        ("7\t1\t2\tWhy?\tHow come?", 5),  # an id that is none of the broken pairs'
        ('12330\t23766\t9\tWhy?\t"Is she', 5),
        ("Why?\t0", 2),
        ('"\t1', 2),  # their halves have the label 0
        ('"\tWhat does the Quran say about homosexuality?\t1', 3),
        ('12330\t23766\t23767\tWhy?\t"Is she\t0\t0', 7),
        ("", 1),
    ],
)
def test_any_other_malformed_row_of_qqp_is_an_error(tmp_path, row, fields, capsys):
    file = write(tmp_path, "train.tsv", QQP, WHOLE, row, WHOLE)
    assert problem("qqp", file).startswith(f"{file}:3: {fields} fields where there are 6 columns (id, qid1, ")
    assert capsys.readouterr().err == ""
