"""The loop: one line a step whatever happens, saves on time, skipped steps reported, and stops when it should."""

import math
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasparse.config.schema import Config
from megasparse.errors import StorageError, TrainingError
from megasparse.optimizers import learning_rate
from megasparse.training.checkpoints.manifest import list_checkpoints, read_manifest
from megasparse.training.loop import train
from megasparse.training.ranks import RunHooks, StopWanted
from megasparse.training.state import Selection
from tests.helpers.tiny import TinyModel, metrics, tiny_config, tiny_run


def launch(config: Config, model: TinyModel | None = None, interrupted: int = 0, **options: Any) -> list[int]:
    """Start or resume the run. Return the steps at which it evaluated. interrupted: a stop ends this evaluation."""
    evaluated = []

    def evaluate(step: int) -> dict[str, float | str]:
        every = config.evaluation.every
        if not every or step % every:
            return {}
        evaluated.append(step)
        if step == interrupted:
            raise StopWanted
        return {"evaluation/bits_per_dim": 8.0 / step, "evaluation/sample": "text"}

    with tiny_run(config, model, evaluate=evaluate, **options) as run:
        run.selection = Selection("evaluation/bits_per_dim", lower=True) if interrupted else None
        assert train(run).complete == (run.saver.saved == config.training.steps and evaluated[-1:] != [interrupted])
    return evaluated


def curves(config: Config) -> list[list[Any]]:
    keys = ("step", "train/loss", "optimizer/gradient_norm", "optimizer/learning_rate", "evaluation/bits_per_dim")
    return [[line.get(key) for key in keys] for line in metrics(config)]


def test_a_run_past_its_last_step_explains_why_it_does_not_start(tmp_path, capsys):
    config = tiny_config(tmp_path, checkpoint={"every": 0})
    launch(config, stop_at=7)
    for stop, why in ((0, "is before"), (7, "is"), (5, "is before")):
        capsys.readouterr()
        launch(config, stop_at=stop)
        message = capsys.readouterr().err
        assert f"--stop-at {stop}: step {stop} {why} the run's step 7 of 20. Use a later" in message
        assert "nothing left" not in message
    launch(config)
    done = (tmp_path / "metrics.jsonl").read_bytes()
    launch(config, stop_at=5)
    assert "nothing left to do: all 20 steps are done (training.steps)" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_bytes() == done and len(metrics(config)) == 20
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["00000007", "00000020"]


def test_every_step_has_one_line_with_every_scalar_and_tensorboard_some(tmp_path, monkeypatch):
    monkeypatch.setattr("megasparse.training.reporting.memory._peak", lambda device: 0.5)
    config = tiny_config(tmp_path, evaluation={"every": 6}, logging={"every": 5})
    assert launch(config) == [6, 12, 18]
    written = metrics(config)
    assert [line["step"] for line in written] == list(range(1, 21))
    for line in written:
        assert line["train/bits_per_dim"] == pytest.approx(line["train/loss"] / math.log(2), rel=1e-12)
        assert line["optimizer/learning_rate"] == learning_rate(int(line["step"]), 20, config.optimizer)
        assert line["train/skipped_steps"] == 0
        assert line["memory/peak_bytes"] > 1e6 and line["speed/data_wait_seconds"] == 0.0
        rate = line["speed/tokens_per_second"]
        assert rate == pytest.approx(8 * 24 / line["speed/step_seconds"])
        assert line["speed/model_flops_utilisation"] == pytest.approx(1e6 * rate / 0.5e12)
        assert ("evaluation/bits_per_dim" in line) == (line["step"] % 6 == 0)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["00000010", "00000020"]
    assert Config.model_validate_json((tmp_path / "config.json").read_text()) == config
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [5, 6, 10, 12, 15, 18, 20]
    assert [event.step for event in board.Scalars("evaluation/bits_per_dim")] == [6, 12, 18]
    assert "evaluation/sample/text_summary" in board.Tags()["tensors"]


def test_a_skipped_step_is_reported_and_counted(tmp_path, capsys):
    config, model = tiny_config(tmp_path), TinyModel()
    model.poisoned = {17: math.nan, 90: math.inf}  # of steps 3 and 12
    launch(config, model)
    assert [line["train/skipped_steps"] for line in metrics(config)] == [0, 0, *[1] * 9, *[2] * 9]
    said = capsys.readouterr().err
    assert "STEP 3 SKIPPED" in said and "STEP 12 SKIPPED" in said and "STEP 4 SKIPPED" not in said
    assert (tmp_path / "metrics.jsonl").read_text().count("null") == 2, "what is not finite is null: NaN is no JSON"


@pytest.mark.parametrize("most", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_too_many_skipped_steps_in_a_row_stop_the_run(most, tmp_path, monkeypatch):
    monkeypatch.setattr("megasparse.training.loop.MAX_SKIPPED", most)
    config, model = tiny_config(tmp_path), TinyModel()
    # One step fewer from step 2 on, and all from step 12 on.
    model.poisoned = {sample: math.nan for sample in (*range(8, 8 * most, 8), *range(88, 200))}
    with pytest.raises(
        TrainingError, match=rf"step {11 + most}: {most} steps in a row were not applied.*optimizer.learning_rate"
    ):
        launch(config, model)
    assert len(metrics(config)) == 11 + most
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["00000010"]


def test_a_requested_stop_saves_before_the_next_step_and_resumes_exactly(tmp_path):
    straight, stopped = tiny_config(tmp_path / "straight"), tiny_config(tmp_path / "stopped")
    launch(straight)
    reported: list[str] = []
    launch(stopped, hooks=RunHooks(stop_wanted=lambda: "step 14, micro-batch 1" in reported, progress=reported.append))
    assert [line["step"] for line in metrics(stopped)] == list(range(1, 15))
    assert [path.name for path in list_checkpoints(tmp_path / "stopped" / "checkpoints")] == ["00000010", "00000014"]
    launch(stopped, hooks=RunHooks(stop_wanted=lambda: True))  # nothing is done and nothing is saved twice
    launch(stopped)
    assert curves(stopped) == curves(straight)


@pytest.mark.parametrize("step", [5, 20])
def test_an_evaluation_that_a_stop_interrupts_is_repeated_on_resume(tmp_path, step):
    straight, stopped = (tiny_config(tmp_path / name, evaluation={"every": 5}) for name in ("straight", "stopped"))
    launch(straight, interrupted=99)
    assert launch(stopped, interrupted=step)[-1] == step and launch(stopped, interrupted=step) == [step]
    assert len(metrics(stopped)) == step and "evaluation/bits_per_dim" not in metrics(stopped)[-1]
    assert launch(stopped, interrupted=99) == list(range(step, 21, 5)) and launch(stopped) == []
    assert curves(stopped) == curves(straight)
    one, other = (read_manifest(tmp_path / name / "checkpoints" / "00000020") for name in ("straight", "stopped"))
    assert one["state"] == other["state"] and one["state"]["selection"]["step"] == 20


def test_a_run_whose_last_checkpoint_fails_exits_with_an_error(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, checkpoint={"every": 10, "on_failure": "continue"})
    monkeypatch.setattr("megasparse.training.checkpoints.saving.free_bytes", lambda folder: 5)
    with pytest.raises(StorageError, match="the last step, 20, is not saved"):
        launch(config)
    assert len(metrics(config)) == 20
