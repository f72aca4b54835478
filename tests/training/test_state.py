"""The best step: detection, the end of training, and a resumed state."""

import json
import math

import pytest

from megasparse.training.state import Selection
from tests.helpers.cases import together

METRIC = "evaluation/f1"


def note(selection: Selection, values: list[float], start: int = 0) -> Selection:
    """After the evaluations at steps 10, 20, ... from number `start` on."""
    for number, value in list(enumerate(values, start=1))[start:]:
        selection.note(10 * number, {METRIC: value, "evaluation/loss": number, "train/loss": 9.0})
    return selection


def noted(values: list[float], patience: int = 0, lower: bool = False) -> Selection:
    return note(Selection(METRIC, patience, lower), values)


@together(
    ("values", "lower", "best"),
    [
        ([0.2, 0.5, 0.5, 0.4], False, [True, True, False, False]),
        ([-0.5, -0.5, 0.0, -1.0], False, [True, False, True, False]),
        ([0.0, 0.0, -0.0, -0.5, 1.0, -0.5, -math.inf], True, [True, False, False, True, False, False, True]),
        ([math.nan], False, [False]),
    ],
)
def test_note_returns_whether_a_step_is_the_best_so_far(values, lower, best):
    selection = Selection(METRIC, lower=lower)
    assert [selection.note(step, {METRIC: value}) for step, value in enumerate(values)] == best


@pytest.mark.parametrize(
    ("values", "lower", "step"),
    [([math.nan, -1.0, math.nan], False, 20), ([math.nan, 9.0, math.nan, 8.0, math.nan], True, 40)],
)
def test_nan_is_worse_than_anything(values, lower, step):
    selection = noted(values, patience=2, lower=lower)
    assert (selection.step, selection.without_better) == (step, 1) and not selection.exhausted
    assert noted([math.nan], lower=lower).step is None
    assert noted([values[1], math.nan, math.nan], patience=2, lower=lower).exhausted
    worst = math.inf if lower else -math.inf
    assert noted([math.nan, worst], lower=lower).value == worst


def test_patience():
    better = [0.1, 0.0, 0.2, 0.1]
    assert [noted(better[:n], patience=2).exhausted for n in range(5)] == [False] * 5
    assert noted([*better, 0.2], patience=2).exhausted
    assert not noted([0.1] * 100, patience=0).exhausted


@pytest.mark.parametrize(("values", "lower"), [([0.1, 0.4, 0.3, 0.3, 0.2], False), ([0.4, 0.1, 0.2, 0.1, 0.3], True)])
def test_a_resumed_run_remembers_its_best(tmp_path, values, lower):
    straight = noted(values, 3, lower)
    for stop in range(len(values)):
        resumed = Selection(METRIC, 3, lower)
        resumed.restore(json.loads(json.dumps(noted(values[:stop], 3, lower).state())))
        assert note(resumed, values, stop).state() == straight.state() and resumed.exhausted
    assert straight.scalars == {METRIC: values[1], "evaluation/loss": 2}
    straight.write(tmp_path / "best.json")
    result = json.loads((tmp_path / "best.json").read_text())
    assert result["metric"] == METRIC and result["step"] == 20 and result["value"] == values[1]


def test_an_empty_state_changes_nothing_and_another_metric_is_ignored():
    """The metric of evaluation may change when a run resumes."""
    selection = Selection("evaluation/accuracy")
    selection.restore({})
    assert selection.state() == Selection("evaluation/accuracy").state()
    selection.restore(noted([0.9]).state())
    assert selection.step is None and selection.note(20, {"evaluation/accuracy": 0.1})
