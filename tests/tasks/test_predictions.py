"""The common part of forms, and prediction files; rejected requests leave none."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from megasparse.errors import ConfigError, DataError, UserError
from megasparse.evaluation.outputs import require_writable, whole_file
from megasparse.tasks.batches import EncodedExample, Segments
from megasparse.tasks.form import column
from megasparse.tasks.run import Prediction, predictions, write_predictions
from megasparse.tasks.task import Example, SourceLocation
from tests.helpers.finetuning import ENCODER, configured, form_for

CLASSES = ["bad", "so, so", "good"]


def encoded(name, label, line=None):
    ids = np.array([1, 2])
    return EncodedExample((Segments(ids, ids * 0),), label, SourceLocation(Path("new.csv"), line), name)


def form_of_labels(labels):
    return form_for(configured(Path("run"), Path("table.csv"), model=ENCODER, task={"labels": labels}))


OF_CLASSES, OF_NUMBERS = form_of_labels(CLASSES), form_of_labels([])


def predicted(*values):
    return Prediction(np.array(values), math.nan, math.nan)


def predictions_of_classes():
    values = [predicted(1.0, 0.0, -1.0), predicted(0.0, 3.0, 5.0)]
    return predictions(OF_CLASSES, [encoded("a", 2, 2), encoded("b", None)], values)


def predictions_of_numbers():
    return predictions(OF_NUMBERS, [encoded("7", 2.5, 1)], [predicted(0.1)])


def test_a_row_has_the_names_of_classes_and_their_probabilities():
    first, second = predictions_of_classes()
    probabilities = first.pop("probabilities")
    assert first == {"name": "a", "file": "new.csv", "line": 2, "label": "good", "predicted": "bad"}
    total = math.e + 1 + 1 / math.e
    assert list(probabilities) == CLASSES
    assert list(probabilities.values()) == pytest.approx([math.e / total, 1 / total, 1 / math.e / total])
    assert (second["line"], second["label"], second["predicted"]) == (None, None, "good")
    row = {"name": "7", "file": "new.csv", "line": 1, "label": 2.5, "predicted": 0.1, "probabilities": None}
    assert predictions_of_numbers() == [row]


def test_forms_by_suffix(tmp_path):
    rows = predictions_of_classes()
    for suffix in (".jsonl", ".json", ".csv", ".tsv"):
        write_predictions(tmp_path / "new" / f"out{suffix}", rows)
    assert [json.loads(line) for line in (tmp_path / "new" / "out.jsonl").read_text().splitlines()] == rows
    with open(tmp_path / "new" / "out.csv", newline="") as stream:
        header, *lines = csv.reader(stream)
    assert header == ["name", "predicted", "probability of bad", "probability of so, so", "probability of good"]
    assert [line[:2] for line in lines] == [["a", "bad"], ["b", "good"]]
    assert [float(value) for value in lines[1][2:]] == list(rows[1]["probabilities"].values())
    assert (tmp_path / "new" / "out.tsv").read_text() == "index\tprediction\na\tbad\nb\tgood\n"
    assert json.loads((tmp_path / "new" / "out.json").read_text()) == {"a": "bad", "b": "good"}
    write_predictions(tmp_path / "numbers.csv", predictions_of_numbers())
    assert (tmp_path / "numbers.csv").read_text() == "name,predicted\n7,0.1\n"
    write_predictions(tmp_path / "numbers.json", predictions_of_numbers())
    assert json.loads((tmp_path / "numbers.json").read_text()) == {"7": 0.1}


def test_a_duplicate_name_that_would_lose_a_prediction_is_rejected(tmp_path):
    examples = [encoded("7", 2.5, 1), encoded("8", 0.5, 2), encoded("7", 1.5, 3)]
    rows = predictions(OF_NUMBERS, examples, [predicted(0.1)] * 3)
    with pytest.raises(DataError, match=r'^new\.csv:3: .*"7".*twice.*\.jsonl'):
        write_predictions(tmp_path / "out.json", rows)
    assert not list(tmp_path.iterdir())
    write_predictions(tmp_path / "out.jsonl", rows)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


def test_unrepresentable_predictions_are_rejected_and_the_old_file_stays(tmp_path):
    out = tmp_path / "out.tsv"
    out.write_text("old")
    rows = predictions_of_classes()
    rows[1]["predicted"] = "a\tb"
    with pytest.raises(DataError, match="contains a tab"):
        write_predictions(out, rows)
    assert out.read_text() == "old"
    for name in ("out.xml", "out"):
        with pytest.raises(ConfigError, match=rf'"{Path(name).suffix}" is not a known format'):
            write_predictions(tmp_path / name, rows)
    assert [path.name for path in tmp_path.iterdir()] == ["out.tsv"]


def test_outputs_are_rejected_before_the_work(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path, message in ((tmp_path, "a folder"), (file / "out.csv", "cannot be written"), (file, "is an input file")):
        with pytest.raises(UserError, match=message):
            require_writable(None, path, sources=[str(tmp_path / "." / "file")])
    with pytest.raises(UserError, match=r"cannot be written \(No space"), whole_file(tmp_path / "out") as out:
        out.write(b"half")
        raise OSError(28, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_column_of_anything_else_has_an_object_a_row():
    for values in (["a", "", "a long one"], [[1, 2], [3, 4]], [[1, 2], [3]], [[]], [("a", "b"), ("c", "d")], [1, None]):
        result = column(values)
        assert result.dtype == object and result.shape == (len(values),) and list(result) == values
        drawn = result[np.array([len(values) - 1, 0, 0])]  # as a bootstrap does
        assert list(drawn) == [values[-1], values[0], values[0]] and type(drawn[0]) is type(values[-1])


def test_a_sketch_learns_the_tasks_classes_or_as_many_as_its_numbers_are_high():
    train = [Example(("a",), label, SourceLocation(Path("made"), 1), "0") for label in (0.4, 3.6, None)]
    result = [form_of_labels(labels).sketch_labels(train[:count]) for labels, count in ((CLASSES, 3), ([], 3), ([], 1))]
    assert result == [3, 5, 2]
