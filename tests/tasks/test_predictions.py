"""Predictions over batches and ranks, the validation that the training loop calls, and prediction files."""

import csv
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megasparse.config.finetuning import FinetuneConfig
from megasparse.errors import ConfigError, UserError
from megasparse.evaluation.outputs import require_writable, write_output
from megasparse.tasks.batches import EncodedExample, Segments
from megasparse.tasks.form import Form, column
from megasparse.tasks.run import Prediction, answers, predict_examples, predictions, validation, write_predictions
from megasparse.tasks.task import Example, SourceLocation
from megasparse.training.ranks import Ranks, RunHooks, StopWanted
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.finetuning import ENCODER, configured, form_for, opened, reviews
from tests.helpers.ranks_in_threads import run_in_threads

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


def test_unrepresentable_predictions_are_rejected_and_the_old_file_stays(tmp_path):
    out = tmp_path / "out.tsv"
    out.write_text("old")
    rows = predictions_of_classes()
    rows[1]["predicted"] = "a\tb"
    refusal(lambda: write_predictions(out, rows), match="contains a tab")
    for name in ("out.xml", "out"):
        with pytest.raises(ConfigError, match=rf'"{Path(name).suffix}" is not a format'):
            write_predictions(tmp_path / name, rows)
    rows = predictions(OF_NUMBERS, [encoded(name, 1.5, line) for line, name in enumerate("787")], [predicted(0.1)] * 3)
    refusal(lambda: write_predictions(tmp_path / "out.json", rows), match=r'^new\.csv:2: .*"7".*twice.*\.jsonl')
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]
    write_predictions(tmp_path / "out.jsonl", rows)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


def test_outputs_are_rejected_before_the_work(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for path, message in ((tmp_path, "a folder"), (file / "out.csv", "cannot be written"), (file, "is an input file")):
        with pytest.raises(UserError, match=message):
            require_writable(None, path, sources=[str(tmp_path / "." / "file")])

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space"):
        write_output(tmp_path / "out", b"half")
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


LENGTHS = [3, 40, 1, 17, 17, 8, 25]


def examples() -> list[EncodedExample]:
    made = []
    for number, length in enumerate(LENGTHS):
        ids = np.full(length, number)
        made.append(EncodedExample((Segments(ids, ids * 0),), number % 2, SourceLocation(Path("made"), 1), str(number)))
    return made


def settled(folder: Path, batch: int) -> FinetuneConfig:
    task = {"labels": ["no", "yes"], "max_length": 128}
    return configured(folder / "run", folder / "none.csv", model=ENCODER, task=task, evaluation={"batch": batch})


def test_the_longest_come_first_and_batches_have_little_padding(tmp_path):
    config, widths = settled(tmp_path, batch=2), []

    def score(inputs: Any, rng: Any) -> tuple[Any, dict[str, Any]]:
        (read,) = inputs.sequences
        widths.append(read.tokens.shape[1])
        return None, {"predicted": read.lengths.float().unsqueeze(1)}

    predicted = predict_examples(score, form_for(config), examples(), config, Ranks())
    assert {each.values.dtype for each in predicted} == {np.dtype(np.float64)} and widths == [40, 24, 8, 8]


class FakeEngine:
    ranks = Ranks()

    def __init__(self, model: torch.nn.Module):
        self.module = model

    def evaluate(self, inputs: Any, rng: Any) -> Any:
        assert not self.module.training
        with torch.no_grad():
            return self.module(inputs, rng)


def test_validation_comes_when_it_is_due_and_returns_the_tasks_loss_and_metrics(tmp_path):
    run = opened(tmp_path / "run", reviews(tmp_path / "table.csv", 40), model={**ENCODER, "layers": 1},
                 task={"max_length": 128}, evaluation={"every": 4}, training={"steps": 6})  # fmt: skip
    run.model.train()
    validate = validation(run, FakeEngine(run.model), RunHooks())  # type: ignore[arg-type]
    due = {step: validate(step) for step in range(1, 7)}
    assert [step for step in due if due[step]] == [4, 6] and run.model.training
    assert due[4] == due[6] and set(due[4]) == {"evaluation/loss", "evaluation/accuracy", "evaluation/macro_f1"}
    table = predict_examples(FakeEngine(run.model.eval()).evaluate, run.form, run.validation, run.config, Ranks())
    predicted = torch.from_numpy(np.stack([each.values for each in table]))
    labels = [each.label for each in run.validation]
    nats = [-math.log(torch.softmax(p, 0)[int(label or 0)].item()) for p, label in zip(predicted, labels, strict=True)]
    assert due[4]["evaluation/loss"] == pytest.approx(sum(nats) / len(nats))
    right = sum(int(row.argmax()) == label for row, label in zip(predicted, labels, strict=True))
    assert due[4]["evaluation/accuracy"] == right / len(labels)


def test_a_stop_interrupts_a_validation_and_training_resumes(tmp_path):
    run = opened(tmp_path / "run", reviews(tmp_path / "table.csv", 12), model={**ENCODER, "layers": 1})
    run.model.train()
    engine: Any = FakeEngine(run.model)
    with pytest.raises(StopWanted):
        validation(run, engine, RunHooks(stop_wanted=lambda: True))(2)
    assert run.model.training


class Weighted(Form):
    """A model that predicts an example's number once per token, with a cost and a weight."""

    encoder = model = None  # type: ignore[assignment]

    def collate(self, examples: Sequence[EncodedExample]) -> Any:
        pairs = [(int(example.name), example.length) for example in examples]
        return SimpleNamespace(to=lambda device: pairs)

    def answer(self, example: EncodedExample, predicted: np.ndarray) -> list[float]:
        return predicted.tolist()

    def measures(self, examples: Sequence[EncodedExample], answers: Sequence[Any]) -> dict[str, float]:
        return {"numbers": sum(len(answer) for answer in answers)}


COSTS, WEIGHTS = [7.0, 1.5, 0.0, 4.0, 2.5, 11.0, 0.25], [3.0, 40.0, 0.0, 17.0, 1.0, 8.0, 25.0]


class OfUnequalWeight(torch.nn.Module):
    def forward(self, batch: list[tuple[int, int]], rng: Any) -> tuple[Any, dict[str, Any]]:
        assert rng.samples.tolist() == [number for number, _ in batch]
        return None, {
            "predicted": [torch.full((1, length), float(number)) for number, length in batch],
            "costs": torch.tensor([COSTS[number] for number, _ in batch]),
            "weights": torch.tensor([WEIGHTS[number] for number, _ in batch]),
        }


@together("size", [1, 2, 3, 16])
@together("ranks", [1, 2, 3])
def test_the_loss_of_a_validation_is_the_sum_of_costs_over_the_sum_of_weights(tmp_path, size, ranks):
    config = settled(tmp_path, batch=size)
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every": 1})})
    form: Any = Weighted(form_for(config).task, config)

    def work(own: Ranks) -> tuple[dict[str, float], list[Prediction]]:
        engine: Any = FakeEngine(OfUnequalWeight())
        engine.ranks = own
        run: Any = SimpleNamespace(config=config, form=form, validation=examples())
        result = validation(run, engine, RunHooks())(1)
        return result, predict_examples(engine.module.eval(), form, examples(), config, own)

    predicted = run_in_threads(work, ranks) if ranks > 1 else [work(Ranks())]
    assert not [each for each in predicted if isinstance(each, Exception)]
    for result, rows in predicted:
        assert result == {"evaluation/loss": pytest.approx(26.25 / 94), "evaluation/numbers": sum(LENGTHS)}
        assert [(each.cost, each.weight) for each in rows] == list(zip(COSTS, WEIGHTS, strict=True))
        assert answers(form, examples(), rows) == [[float(number)] * length for number, length in enumerate(LENGTHS)]
