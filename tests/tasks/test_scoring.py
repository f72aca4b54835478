"""What a model tells of examples, over batches and ranks, and the validation that the training loop calls."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megasparse.tasks.batches import Inputs
from megasparse.tasks.encoding import Encoded, Segments
from megasparse.tasks.scoring import answers, measures, tell, validation
from megasparse.tasks.task import Place
from megasparse.training.ranks import Ranks
from megasparse.training.watch import StopWanted, Watch
from tests.helpers.finetuning import configured, opened, reviews, table
from tests.helpers.ranks_in_threads import run_in_threads

LENGTHS = [3, 40, 1, 17, 17, 8, 25]


def examples() -> list[Encoded]:
    made = []
    for number, length in enumerate(LENGTHS):
        ids = np.full(length, number)
        made.append(Encoded((Segments(ids, ids * 0),), number % 2, Place(Path("made"), 1), str(number)))
    return made


class Score:
    """Tells an example its number and length; keeps what it was asked."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[int], int]] = []

    def __call__(self, inputs: Any, draws: Any) -> tuple[Any, dict[str, Any]]:
        (read,) = inputs.sequences
        assert isinstance(inputs, Inputs) and not draws.training
        self.batches.append((draws.samples.tolist(), read.tokens.shape[1]))
        return None, {"told": torch.stack([read.tokens[:, 0].float(), read.lengths.float()], dim=1)}


@pytest.mark.parametrize("batch", [1, 2, 3, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_example_is_told_its_own_on_every_rank(tmp_path: Path, batch: int, ranks: int) -> None:
    config = configured(tmp_path, tmp_path, start={"huggingface": "x"}, evaluation={"batch": batch})

    def work(own: Ranks) -> tuple[list[Any], list[Any]]:
        score = Score()
        return tell(score, examples(), config, own).tolist(), score.batches

    found = run_in_threads(work, ranks) if ranks > 1 else [work(Ranks())]
    assert not [each for each in found if isinstance(each, Exception)]
    for told, _ in found:
        assert told == [[float(number), float(length)] for number, length in enumerate(LENGTHS)]
    assert len({len(batches) for _, batches in found}) == 1  # else one rank would wait for ever
    scored = {number for _, batches in found for numbers, _ in batches for number in numbers}
    assert scored == set(range(len(LENGTHS)))


def test_the_longest_come_first_and_batches_have_little_padding(tmp_path: Path) -> None:
    config, score = configured(tmp_path, tmp_path, start={"huggingface": "x"}, evaluation={"batch": 2}), Score()
    told = tell(score, examples(), config, Ranks())
    assert told.dtype == np.float64 and [width for _, width in score.batches] == [40, 24, 8, 8]


def test_a_pause_comes_before_each_batch(tmp_path: Path) -> None:
    config, score, pauses = configured(tmp_path, tmp_path, start={"huggingface": "x"}), Score(), []
    tell(score, examples(), config, Ranks(), lambda: pauses.append(len(score.batches)))
    assert pauses == [0, 1]


class Given:
    """A task that tells classes, or numbers."""

    def __init__(self, classes: tuple[str, ...] | None, *metrics: str):
        self.classes, self.metrics = classes, metrics


def test_answers_and_measures() -> None:
    made = examples()[:4]  # labels 0 1 0 1
    told = np.array([[2.0, 1.0], [0.0, 3.0], [-1.0, 0.5], [-5.0, -4.0]])
    task: Any = Given(("no", "yes"), "accuracy", "f1")
    assert answers(task, told).tolist() == [0, 1, 1, 1]
    assert measures(task, made, told) == {"accuracy": 0.75, "f1": pytest.approx(2 * 2 / (2 * 2 + 1))}
    task = Given(None, "pearson")
    numbers = np.array([[1.0], [3.0], [0.0], [2.0]])
    assert answers(task, numbers).tolist() == [1.0, 3.0, 0.0, 2.0]
    assert measures(task, made, numbers) == {"pearson": pytest.approx(np.corrcoef([0, 1, 0, 1], [1, 3, 0, 2])[0, 1])}


class FakeEngine:
    """Around a model, without an optimizer."""

    ranks = Ranks()

    def __init__(self, model: torch.nn.Module):
        self.module = model

    def evaluate(self, inputs: Any, draws: Any) -> Any:
        assert not self.module.training
        with torch.no_grad():
            return self.module(inputs, draws)


def test_validation_comes_when_it_is_due_and_tells_the_tasks_loss_and_metrics(tmp_path: Path) -> None:
    model = {"kind": "encoder", "layers": 1, "d_model": 16, "d_ff": 16, "heads": 2, "vocabulary": 264,
             "max_length": 128, "positions": {"kind": "learned"}, "attention": {"pattern": ["full"]}}  # fmt: skip
    run = opened(tmp_path / "run", reviews(tmp_path / "table.csv", 40), model=model, task={"max_length": 128},
                 evaluation={"every": 4}, training={"steps": 6})  # fmt: skip
    run.model.train()
    validate = validation(run, FakeEngine(run.model), Watch())  # type: ignore[arg-type]
    due = {step: validate(step) for step in range(1, 7)}
    assert [step for step in due if due[step]] == [4, 6] and run.model.training
    assert due[4] == due[6] and set(due[4]) == {"evaluation/loss", "evaluation/accuracy", "evaluation/macro_f1"}
    told = torch.from_numpy(tell(FakeEngine(run.model.eval()).evaluate, run.validation, run.config, Ranks()))
    labels = [each.label for each in run.validation]
    nats = [-math.log(torch.softmax(row, 0)[int(label or 0)].item()) for row, label in zip(told, labels, strict=True)]
    assert due[4]["evaluation/loss"] == pytest.approx(sum(nats) / len(nats))
    right = sum(int(row.argmax()) == label for row, label in zip(told, labels, strict=True))
    assert due[4]["evaluation/accuracy"] == right / len(labels)


def test_a_stop_breaks_a_validation_off_and_training_goes_on(tmp_path: Path) -> None:
    model = {"kind": "encoder", "layers": 1, "d_model": 16, "d_ff": 16, "heads": 2, "vocabulary": 264,
             "max_length": 128, "positions": {"kind": "learned"}, "attention": {"pattern": ["full"]}}  # fmt: skip
    rows = [["a b", "1.5"], ["c", "2"], ["d", "0"], ["e f g", "3"], ["h", "1"]]
    run = opened(tmp_path / "run", table(tmp_path / "table.csv", rows), model=model, task={"labels": []})
    run.model.train()
    engine = FakeEngine(run.model)
    with pytest.raises(StopWanted):
        validation(run, engine, Watch(stop_wanted=lambda: True))(2)  # type: ignore[arg-type]
    assert run.model.training
    found = validation(run, engine, Watch())(2)  # type: ignore[arg-type]
    (label,) = [each.label for each in run.validation]
    told = tell(FakeEngine(run.model.eval()).evaluate, run.validation, run.config, Ranks())
    assert found["evaluation/loss"] == pytest.approx((told[0, 0] - label) ** 2) and found["evaluation/pearson"] == 0.0
