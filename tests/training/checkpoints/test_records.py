"""metrics.jsonl and checkpoints that contradict each other are found when a run goes on, or put right."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megasparse.config.schema import Config
from megasparse.errors import CheckpointError
from megasparse.training.loop import train
from tests.helpers.tiny import metrics, tiny_config, tiny_run


def config_of(folder: Path, steps: int = 6, **checkpoint: Any) -> Config:
    return tiny_config(folder, training={"steps": steps}, checkpoint={"every": 2, "keep": 5, **checkpoint})


def run(config: Config, stop_at: int | None = None, **options: Any) -> list[str]:
    """Train; the losses of all steps to the last bit."""
    with tiny_run(config, stop_at=stop_at, **options) as opened:
        train(opened)
    rows = metrics(config)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [float(row["train/loss"]).hex() for row in rows]


@pytest.fixture
def straight(tmp_path):
    return run(config_of(tmp_path / "straight"))


def lines(folder: Path) -> list[bytes]:
    return (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)


def remove(folder: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(folder / "checkpoints" / f"{step:08d}")


def test_a_run_that_has_lost_newer_checkpoints_says_so_and_goes_on(tmp_path, straight, capsys):
    config = config_of(tmp_path / "run")
    run(config)
    remove(tmp_path / "run", 4, 6)
    capsys.readouterr()
    assert run(config) == straight
    said = capsys.readouterr().err
    assert "has come to step 6, and the checkpoint of step 4 is not there: going on from step 2" in said


@pytest.mark.parametrize(("asynchronous", "stop", "refused"), [(False, 2, False), (False, 3, True), (True, 4, False)])
def test_a_run_whose_checkpoints_are_gone_never_starts_at_0_in_silence(tmp_path, straight, asynchronous, stop, refused):
    """Where one must have been there: a line of step 3 is written after the save of step 2."""
    folder = tmp_path / "run"
    config = config_of(folder, asynchronous=asynchronous)
    run(config, stop_at=stop)
    before = lines(folder)
    shutil.rmtree(folder / "checkpoints")
    if not refused:
        assert run(config) == straight
        return
    with pytest.raises(CheckpointError, match=rf"has come to step {stop}, and the checkpoint of step 2 is not there"):
        run(config)
    assert lines(folder) == before, "nothing was cut"
    assert run(config, resume="never") == straight


@pytest.mark.parametrize("changed", [{"every": 0}, {"on_failure": "continue"}])
def test_where_nothing_had_to_be_saved_nothing_is_missed(tmp_path, straight, changed):
    config = config_of(tmp_path / "run", **changed)
    run(config, stop_at=5)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert run(config) == straight


def test_a_checkpoint_and_metrics_of_different_runs_are_refused(tmp_path):
    """The same configuration and data, but a checkpoint that another run has saved: here, with other losses."""
    config = config_of(tmp_path / "run")
    run(config, stop_at=4)
    own = lines(tmp_path / "run")
    row = json.loads(own[3])
    other = json.dumps(row | {"train/loss": row["train/loss"] + 1e-9}).encode() + b"\n"
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"".join([*own[:3], other]))
    with pytest.raises(CheckpointError, match=r"00000004: the loss of step 4 is .* they are not of one run\. Move"):
        run(config)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with tiny_run(config) as opened:
        train(opened)
    assert [row["step"] for row in metrics(config)] == [5, 6]


def test_lines_that_are_missing_before_the_checkpoint_are_reported(tmp_path, capsys):
    config = config_of(tmp_path / "run")
    run(config, stop_at=4)
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"".join(lines(tmp_path / "run")[:1]) + b'{"step": 2, "tra')
    with tiny_run(config) as opened:
        train(opened)
    assert "ends at step 1, before the checkpoint: steps 2 to 4 have no line" in capsys.readouterr().err
    assert [row["step"] for row in metrics(config)] == [1, 5, 6]
