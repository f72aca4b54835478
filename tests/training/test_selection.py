"""Which step was best, what ends training, and what a resumed run remembers."""

import json
import math
from pathlib import Path

from megasparse.training.selection import Selection


def noted(values: list[float], patience: int = 0, lower: bool = False) -> Selection:
    """After evaluations at steps 10, 20, ..."""
    selection = Selection("evaluation/f1", patience, lower)
    for number, value in enumerate(values, start=1):
        selection.note(10 * number, {"evaluation/f1": value, "evaluation/loss": number, "train/loss": 9.0})
    return selection


def test_the_best_is_the_first_of_the_highest() -> None:
    selection = noted([0.2, 0.5, 0.5, 0.4])
    assert (selection.step, selection.value, selection.without_better) == (20, 0.5, 2)
    assert selection.scalars == {"evaluation/f1": 0.5, "evaluation/loss": 2}


def test_note_tells_whether_a_step_is_the_best_so_far() -> None:
    selection = Selection("evaluation/f1")
    reported = [selection.note(step, {"evaluation/f1": value}) for step, value in enumerate([-0.5, -0.5, 0.0, -1.0])]
    assert reported == [True, False, True, False]


def test_a_step_without_an_evaluation_counts_for_nothing() -> None:
    selection = noted([0.5], patience=1)
    assert not selection.note(11, {"train/loss": 1.0}) and not selection.exhausted
    assert (selection.step, selection.without_better) == (10, 0)


def test_nan_is_worse_than_anything() -> None:
    assert noted([math.nan]).step is None
    assert not Selection("evaluation/f1").note(1, {"evaluation/f1": math.nan})
    selection = noted([math.nan, -1.0, math.nan], patience=2)
    assert (selection.step, selection.value, selection.without_better) == (20, -1.0, 1)
    assert not selection.exhausted
    assert noted([math.nan, math.nan], patience=2).exhausted


def test_the_best_of_an_error_is_the_first_of_the_lowest() -> None:
    selection = noted([0.5, 0.2, 0.2, 0.4, 0.2], lower=True)
    assert (selection.step, selection.value, selection.without_better) == (20, 0.2, 3)
    assert selection.scalars == {"evaluation/f1": 0.2, "evaluation/loss": 2}
    selection = Selection("evaluation/f1", lower=True)
    values = [0.0, 0.0, -0.0, -0.5, 1.0, -0.5, -math.inf]
    reported = [selection.note(step, {"evaluation/f1": value}) for step, value in enumerate(values)]
    assert reported == [True, False, False, True, False, False, True]


def test_nan_is_worse_than_any_error() -> None:
    assert noted([math.nan], lower=True).step is None
    selection = noted([math.nan, 9.0, math.nan, 8.0, math.nan], patience=2, lower=True)
    assert (selection.step, selection.value, selection.without_better) == (40, 8.0, 1)
    assert not selection.exhausted and noted([3.0, math.nan, math.nan], patience=2, lower=True).exhausted
    assert noted([math.nan, math.inf], lower=True).value == math.inf


def test_a_resumed_run_goes_on_with_the_lowest() -> None:
    values = [0.4, 0.1, 0.2, 0.1, 0.3]
    for stop in range(len(values)):
        resumed = Selection("evaluation/f1", 3, lower=True)
        resumed.restore(json.loads(json.dumps(noted(values[:stop], 3, lower=True).state())))
        for number in range(stop, len(values)):
            step = 10 * (number + 1)
            resumed.note(step, {"evaluation/f1": values[number], "evaluation/loss": number + 1})
        assert resumed.state() == noted(values, 3, lower=True).state()
        assert resumed.step == 20 and resumed.exhausted


def test_patience() -> None:
    better = [0.1, 0.0, 0.2, 0.1]
    assert [noted(better[:n], patience=2).exhausted for n in range(5)] == [False] * 5
    assert noted([*better, 0.2], patience=2).exhausted
    assert not noted([0.1] * 100, patience=0).exhausted


def test_a_resumed_run_remembers_its_best(tmp_path: Path) -> None:
    values = [0.1, 0.4, 0.3, 0.3, 0.2]
    straight = noted(values, patience=3)
    for stop in range(len(values)):
        resumed = Selection("evaluation/f1", 3)
        resumed.restore(json.loads(json.dumps(noted(values[:stop], 3).state())))
        for number in range(stop, len(values)):
            step = 10 * (number + 1)
            resumed.note(step, {"evaluation/f1": values[number], "evaluation/loss": number + 1})
        assert resumed.state() == straight.state() and resumed.exhausted
    straight.write(tmp_path / "best.json")
    found = json.loads((tmp_path / "best.json").read_text())
    assert found["metric"] == "evaluation/f1" and found["step"] == 20 and found["value"] == 0.4


def test_nothing_to_restore_changes_nothing() -> None:
    selection = Selection("evaluation/f1")
    selection.restore({})
    assert selection.state() == Selection("evaluation/f1").state()


def test_values_of_another_metric_are_no_measure() -> None:
    """The metric of evaluation may change when a run goes on."""
    selection = Selection("evaluation/accuracy")
    selection.restore(noted([0.9]).state())
    assert selection.step is None and selection.note(20, {"evaluation/accuracy": 0.1})
