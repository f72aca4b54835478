"""Predictions over batches and ranks, and the validation that the training loop calls."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megasparse.config.finetuning import FinetuneConfig
from megasparse.tasks.batches import Encoded, Inputs, Segments
from megasparse.tasks.evaluate import Prediction, answers, predict_examples, validation
from megasparse.tasks.form import Form
from megasparse.tasks.task import SourceLocation
from megasparse.training.ranks import Ranks, RunHooks, StopWanted
from tests.helpers.finetuning import ENCODER, configured, form_for, opened, our_body, reviews, table
from tests.helpers.ranks_in_threads import run_in_threads

LENGTHS = [3, 40, 1, 17, 17, 8, 25]


def examples() -> list[Encoded]:
    made = []
    for number, length in enumerate(LENGTHS):
        ids = np.full(length, number)
        made.append(Encoded((Segments(ids, ids * 0),), number % 2, SourceLocation(Path("made"), 1), str(number)))
    return made


def settled(folder: Path, labels: Sequence[str] = ("no", "yes"), batch: int = 4) -> FinetuneConfig:
    """Configuration of a task of given classes, or numbers."""
    task = {"labels": list(labels), "max_length": 128}
    return configured(folder / "run", folder / "none.csv", model=ENCODER, task=task, evaluation={"batch": batch})


class Score:
    """A model that predicts an example's number and length, and keeps its calls."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[int], int]] = []

    def __call__(self, inputs: Any, rng: Any) -> tuple[Any, dict[str, Any]]:
        (read,) = inputs.sequences
        assert isinstance(inputs, Inputs) and not rng.training
        self.batches.append((rng.samples.tolist(), read.tokens.shape[1]))
        return None, {"predicted": torch.stack([read.tokens[:, 0].float(), read.lengths.float()], dim=1)}


@pytest.mark.parametrize("batch", [1, 2, 3, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_example_gets_its_own_prediction_on_every_rank(tmp_path, batch, ranks):
    config = settled(tmp_path, batch=batch)

    def work(own: Ranks) -> tuple[list[Any], list[Any]]:
        score = Score()
        return [
            each.values.tolist() for each in predict_examples(score, form_for(config), examples(), config, own)
        ], score.batches

    found = run_in_threads(work, ranks) if ranks > 1 else [work(Ranks())]
    assert not [each for each in found if isinstance(each, Exception)]
    for predicted, _ in found:
        assert predicted == [[float(number), float(length)] for number, length in enumerate(LENGTHS)]
    assert len({len(batches) for _, batches in found}) == 1  # else one rank would wait for ever
    scored = {number for _, batches in found for numbers, _ in batches for number in numbers}
    assert scored == set(range(len(LENGTHS)))


def test_the_longest_come_first_and_batches_have_little_padding(tmp_path):
    config, score = settled(tmp_path, batch=2), Score()
    predicted = predict_examples(score, form_for(config), examples(), config, Ranks())
    assert {each.values.dtype for each in predicted} == {np.dtype(np.float64)}
    assert [width for _, width in score.batches] == [40, 24, 8, 8]


class FakeEngine:
    """Around a model, without an optimizer."""

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
    nats = [
        -math.log(torch.softmax(row, 0)[int(label or 0)].item()) for row, label in zip(predicted, labels, strict=True)
    ]
    assert due[4]["evaluation/loss"] == pytest.approx(sum(nats) / len(nats))
    right = sum(int(row.argmax()) == label for row, label in zip(predicted, labels, strict=True))
    assert due[4]["evaluation/accuracy"] == right / len(labels)


def test_a_stop_breaks_a_validation_off_and_training_goes_on(tmp_path):
    model = {**ENCODER, "layers": 1}
    rows = [["a b", "1.5"], ["c", "2"], ["d", "0"], ["e f g", "3"], ["h", "1"]]
    run = opened(tmp_path / "run", table(tmp_path / "table.csv", rows), model=model, task={"labels": []})
    run.model.train()
    engine = FakeEngine(run.model)
    with pytest.raises(StopWanted):
        validation(run, engine, RunHooks(stop_wanted=lambda: True))(2)  # type: ignore[arg-type]
    assert run.model.training
    found = validation(run, engine, RunHooks())(2)  # type: ignore[arg-type]
    (label,) = [each.label for each in run.validation]
    (predicted,) = predict_examples(
        FakeEngine(run.model.eval()).evaluate, run.form, run.validation, run.config, Ranks()
    )
    assert found["evaluation/loss"] == pytest.approx((predicted.values[0] - label) ** 2)
    assert found["evaluation/pearson"] == 0.0


class Weighted(Form):
    """A model that predicts an example's number once a token, with a cost and a weight of its own."""

    encoder = model = dummy_batch = None  # type: ignore[assignment]

    def collate(self, examples: Sequence[Encoded]) -> Any:
        pairs = [(int(example.name), example.length) for example in examples]
        return SimpleNamespace(to=lambda device: pairs)

    def answer(self, example: Encoded, predicted: np.ndarray) -> list[float]:
        return predicted.tolist()

    def measures(self, examples: Sequence[Encoded], answers: Sequence[Any]) -> dict[str, float]:
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


@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_validations_loss_is_the_sum_of_costs_by_that_of_weights(tmp_path, size, ranks):
    """Whatever batches and ranks they are in; a batch that is scored twice, so that ranks have equally many, counts
    once. A prediction has its example's own length.
    """
    config = settled(tmp_path, batch=size)
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every": 1})})
    form: Any = Weighted(form_for(config).task, config)

    def work(own: Ranks) -> tuple[dict[str, float], list[Prediction]]:
        engine: Any = FakeEngine(OfUnequalWeight())
        engine.ranks = own
        run: Any = SimpleNamespace(config=config, form=form, validation=examples())
        found = validation(run, engine, RunHooks())(1)
        return found, predict_examples(engine.module.eval(), form, examples(), config, own)

    predicted = run_in_threads(work, ranks) if ranks > 1 else [work(Ranks())]
    assert not [each for each in predicted if isinstance(each, Exception)]
    for found, rows in predicted:
        assert found == {"evaluation/loss": pytest.approx(26.25 / 94), "evaluation/numbers": sum(LENGTHS)}
        assert [(each.cost, each.weight) for each in rows] == list(zip(COSTS, WEIGHTS, strict=True))
        expected = [[float(number)] * length for number, length in enumerate(LENGTHS)]
        assert answers(form, examples(), rows) == expected


@pytest.mark.parametrize("labels", [("no", "yes"), ()])
def test_costs_are_those_of_the_definition_and_nan_without_labels(tmp_path, labels):
    config = settled(tmp_path, labels)
    form = form_for(config)
    model = form.model(our_body()).eval()
    unlabelled = [dataclasses.replace(example, label=None) for example in examples()]
    with torch.no_grad():
        known, unknown = (predict_examples(model, form, each, config, Ranks()) for each in (examples(), unlabelled))
    for example, one, other in zip(examples(), known, unknown, strict=True):
        assert (one.values == other.values).all() and one.weight == 1.0
        assert math.isnan(other.cost) and math.isnan(other.weight)
        logits = one.values
        nats = np.logaddexp.reduce(logits) - logits[example.label] if labels else (logits[0] - example.label) ** 2
        assert one.cost == pytest.approx(nats, rel=1e-5)
