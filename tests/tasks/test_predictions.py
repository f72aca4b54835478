"""What is written of a model's answers, and of what is refused nothing at all."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, DataError, UserError
from megasparse.evaluation.outputs import require_writable, whole_file
from megasparse.tasks import PLACES, build_task
from megasparse.tasks.encoding import Encoded, Segments
from megasparse.tasks.predictions import predictions, write_predictions
from megasparse.tasks.task import Place

CLASSES = ["bad", "so, so", "good"]


def encoded(name, label, line=None):
    ids = np.array([1, 2])
    return Encoded((Segments(ids, ids * 0),), label, Place(Path("new.csv"), line), name)


def told_of_classes():
    task = build_task(TaskConfig(labels=CLASSES))
    table = np.array([[1.0, 0.0, -1.0], [0.0, 3.0, 5.0]])
    return predictions(task, [encoded("a", 2, 2), encoded("b", None)], table)


def told_of_numbers():
    return predictions(build_task(TaskConfig(labels=[])), [encoded("7", 2.5, 1)], np.array([[0.1]]))


def test_a_row_has_the_names_of_classes_and_their_probabilities():
    first, second = told_of_classes()
    probabilities = first.pop("probabilities")
    assert first == {"name": "a", "file": "new.csv", "line": 2, "label": "good", "told": "bad"}
    total = math.e + 1 + 1 / math.e
    assert list(probabilities) == CLASSES
    assert list(probabilities.values()) == pytest.approx([math.e / total, 1 / total, 1 / math.e / total])
    assert (second["line"], second["label"], second["told"]) == (None, None, "good")
    row = {"name": "7", "file": "new.csv", "line": 1, "label": 2.5, "told": 0.1, "probabilities": None}
    assert told_of_numbers() == [row]


def test_forms_by_suffix(tmp_path):
    rows = told_of_classes()
    for suffix in (".jsonl", ".csv", ".tsv"):
        write_predictions(tmp_path / "new" / f"out{suffix}", rows)
    assert [json.loads(line) for line in (tmp_path / "new" / "out.jsonl").read_text().splitlines()] == rows
    with open(tmp_path / "new" / "out.csv", newline="") as stream:
        header, *lines = csv.reader(stream)
    assert header == ["name", "told", "probability of bad", "probability of so, so", "probability of good"]
    assert [line[:2] for line in lines] == [["a", "bad"], ["b", "good"]]
    assert [float(value) for value in lines[1][2:]] == list(rows[1]["probabilities"].values())
    assert (tmp_path / "new" / "out.tsv").read_text() == "index\tprediction\na\tbad\nb\tgood\n"
    write_predictions(tmp_path / "numbers.csv", told_of_numbers())
    assert (tmp_path / "numbers.csv").read_text() == "name,told\n7,0.1\n"


def test_what_a_form_cannot_hold_is_refused_and_the_old_file_stays(tmp_path):
    out = tmp_path / "out.tsv"
    out.write_text("old")
    rows = told_of_classes()
    rows[1]["told"] = "a\tb"
    with pytest.raises(DataError, match="has a tab"):
        write_predictions(out, rows)
    assert out.read_text() == "old"
    with pytest.raises(ConfigError, match=r'"\.txt" does not tell the form'):
        write_predictions(tmp_path / "out.txt", rows)
    assert [path.name for path in tmp_path.iterdir()] == ["out.tsv"]


def test_outputs_are_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "out.csv", "cannot be written"),
        (tmp_path / "file", "is what is read"),
    ):
        with pytest.raises(UserError, match=message):
            require_writable(None, path, sources=[str(tmp_path / "." / "file")])
    with pytest.raises(UserError, match=r"cannot be written \(No space"), whole_file(tmp_path / "out") as out:
        out.write(b"half")
        raise OSError(28, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", PLACES)
def test_who_predicts_on_texts_is_told_of_how_many(name):
    task = build_task(TaskConfig(name=name, labels=CLASSES if name == "table" else None))
    pairs = {"mnli", "mrpc", "qnli", "qqp", "rte", "stsb", "sts_benchmark", "rte_challenge", "aan"}
    assert task.segments == (2 if name in pairs else 1)


def test_a_table_of_pairs_has_two_texts():
    assert build_task(TaskConfig(name="table", text=["question", "answer"], labels=CLASSES)).segments == 2
