"""Predictions over batches and ranks, and the validation that the training loop calls."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megasparse.config.finetuning import FinetuneConfig
from megasparse.tasks.batches import EncodedExample, Segments
from megasparse.tasks.form import Form
from megasparse.tasks.run import Prediction, answers, predict_examples, validation
from megasparse.tasks.task import SourceLocation
from megasparse.training.ranks import Ranks, RunHooks, StopWanted
from tests.helpers.finetuning import ENCODER, configured, form_for, opened, reviews
from tests.helpers.ranks_in_threads import run_in_threads

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


@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
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
        expected = [[float(number)] * length for number, length in enumerate(LENGTHS)]
        assert answers(form, examples(), rows) == expected
