"""Loss spikes and the best step: detection, exclusions, the end of training, and a resumed state."""

import json
import math
import random
import statistics

import pytest

from megasparse.training.state import DEVIATIONS, FEWEST, HISTORY, LossGuard, Selection


def after(losses: list[float]) -> LossGuard:
    guard = LossGuard()
    for loss in losses:
        guard.note(loss, applied=True)
    return guard


def curve(steps: int, seed: int) -> list[float]:
    """A language model's loss in nats: log(256) falling to about 1, with noise per batch."""
    draw = random.Random(seed)
    floor = (1.0 + 3.0 * math.exp(-step / 300) + 1.5 * math.exp(-step / 3000) for step in range(steps))
    return [loss * draw.lognormvariate(0.0, 0.08) for loss in floor]


def test_the_rule_is_the_definition():
    losses = curve(300, seed=1)
    window = losses[-HISTORY:]
    edge = statistics.fmean(window) + DEVIATIONS * statistics.pstdev(window)
    guard = after(losses)
    assert guard.is_spike(edge * (1 + 1e-9)) and not guard.is_spike(edge * (1 - 1e-9))


def test_no_step_of_a_noisy_falling_loss_is_taken_for_a_spike(figures):
    flagged = sum(after(curve(10_000, seed)).spikes for seed in range(5))
    figures(losses_compared=50_000, false_spikes=flagged)
    assert flagged == 0


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_rounding_noise_on_a_constant_loss_is_not_a_spike(scale):
    guard = after([scale] * HISTORY)
    assert not guard.is_spike(scale) and not guard.is_spike(scale * (1 + 1e-6))
    assert guard.is_spike(scale * 1.01)
    assert not after([0.0] * HISTORY).is_spike(0.0)


def test_no_spike_without_32_losses_or_for_non_finite_losses():
    assert not after([1.0] * (FEWEST - 1)).is_spike(1e38)
    guard = after([1.0] * FEWEST)
    assert guard.is_spike(1e38)
    assert not guard.is_spike(math.nan) and not guard.is_spike(math.inf) and not guard.is_spike(-1e38)
    huge = after([1e38 * (1 + i % 2) for i in range(HISTORY)])
    assert not huge.is_spike(2e38) and huge.is_spike(1e39)


def test_an_applied_spike_enters_the_history_and_a_skipped_one_does_not():
    applied, skipped = after(curve(200, 2)), after(curve(200, 2))
    for step in range(6):
        assert skipped.is_spike(50.0)
        skipped.note(50.0, applied=False)
        applied.note(50.0, applied=True)
        assert skipped.skipped_in_a_row == step + 1
    assert skipped.spikes == 6 and skipped.state()["losses"] == after(curve(200, 2)).state()["losses"]
    assert applied.spikes == 4 and applied.skipped_in_a_row == 0, "√(124/4) < 6: four of 128 are no longer rare"


def test_after_a_resume_every_decision_is_the_same():
    losses = [10 * loss if step % 50 == 49 else loss for step, loss in enumerate(curve(600, 3))]

    def spikes_of(guard: LossGuard, part: list[float]) -> list[bool]:
        return [guard.note(loss, applied=not guard.is_spike(loss)) for loss in part]

    straight = LossGuard()
    expected = spikes_of(straight, losses)
    assert sum(expected) == 12 == straight.spikes
    for stop in (1, 31, 49, 50, 128, 333):
        first = LossGuard()
        before = spikes_of(first, losses[:stop])
        second = LossGuard(json.loads(json.dumps(first.state())))
        assert second.state() == first.state()
        assert before + spikes_of(second, losses[stop:]) == expected
        assert second.state() == straight.state()


METRIC = "evaluation/f1"


def note(selection: Selection, values: list[float], start: int = 0) -> Selection:
    """After the evaluations at steps 10, 20, ... from number `start` on."""
    for number, value in list(enumerate(values, start=1))[start:]:
        selection.note(10 * number, {METRIC: value, "evaluation/loss": number, "train/loss": 9.0})
    return selection


def noted(values: list[float], patience: int = 0, lower: bool = False) -> Selection:
    return note(Selection(METRIC, patience, lower), values)


@pytest.mark.parametrize(
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
