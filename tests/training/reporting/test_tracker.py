"""Reports survive failing storage: no line is lost or torn once it works again, and nothing is raised."""

import builtins
import errno
import io
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import mlflow
import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasparse.config.schema import Config
from megasparse.errors import ConfigError
from megasparse.files import JsonLines, cut_lines
from megasparse.training.ranks import Ranks
from megasparse.training.reporting.tracker import Tracker
from tests.helpers.tiny import tiny_config

SCALARS = {"train/loss": 1.25, "optimizer/learning_rate": 1e-3, "speed/tokens_per_second": 10.0}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """The kernel writes as much as fits and fails for the rest, as with a full disk or a quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def reported():
    return []


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        (errno.ENOSPC, ["pwrite"]),
        (errno.EROFS, ["open"]),
        (errno.EIO, ["pwrite", "ftruncate"]),
        (errno.ESTALE, ["pwrite", "open", "close"]),
    ],
)
def test_no_failure_loses_a_line(tmp_path, reported, monkeypatch, code, calls):
    """Half of the data reaches the file before the error, and cutting it off may fail too."""
    path = tmp_path / "metrics.jsonl"
    real_pwrite, real_open = os.pwrite, os.open

    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(code, os.strerror(code))

    def tear(descriptor: int, data: bytes, offset: int) -> int:
        real_pwrite(descriptor, data[: len(data) // 2], offset)
        return fail()

    def refuse(name: str | Path, flags: int, mode: int = 0o777) -> int:
        return fail() if name == path else real_open(name, flags, mode)

    failing = {"pwrite": tear, "open": refuse, "ftruncate": fail, "close": fail}
    expected = []
    file = JsonLines(path, reported.append, last_step=0)
    for step in range(1, 31):
        with monkeypatch.context() as patch:
            if 5 < step <= 10 or step in (15, 20, 29, 30):
                for name in calls:
                    patch.setattr(os, name, failing[name])
            expected.append({"step": step, "x": 0.1 * step})
            file.append(expected[-1])
    file.close()
    assert lines(path) == expected
    assert len(reported) == 8, "each of four failures, and its end"


def test_lines_not_cut_at_the_start_are_cut_later(tmp_path, reported, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    with no_file_longer_than(0):
        file = JsonLines(path, reported.append, last_step=1)
        file.append({"step": 2, "again": True})
        assert lines(path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    file.append({"step": 3})
    assert lines(path) == [{"step": 1}, {"step": 2, "again": True}, {"step": 3}]
    file.close()


def test_cutting_drops_later_and_broken_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    cut_lines(path, 3)
    assert not path.exists()
    path.write_text('{"step": 1}\n{"step": 2, "x": 0.1}\nrubbish\n{"step": 3}\n{"step": 4}\n[5]\n{"step": 2')
    cut_lines(path, 3)
    assert path.read_text() == '{"step": 1}\n{"step": 2, "x": 0.1}\n{"step": 3}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_that_cannot_be_rewritten_whole_stays_as_it_was(tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = "".join(f'{{"step": {step}}}\n' for step in range(100))
    path.write_text(text)
    with no_file_longer_than(100), pytest.raises(OSError):
        cut_lines(path, 50)
    assert path.read_text() == text and [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_events_are_reported_written_and_kept_over_restarts(tmp_path, capsys):
    config = tiny_config(tmp_path)
    with Tracker(config, Ranks(), 0) as tracker:
        tracker.event(9, "LOSS SPIKE at step 9")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"step": 10, "ti')  # a crash
    with Tracker(config, Ranks(), 5) as tracker:
        tracker.event(7, "rank 1 is slow")
    events, said = lines(tmp_path / "events.jsonl"), ["LOSS SPIKE at step 9", "rank 1 is slow"]
    assert [(event["step"], event["message"]) for event in events] == [*zip((9, 7), said, strict=True)]
    assert all(datetime.fromisoformat(event["time"]).utcoffset() == timedelta(0) for event in events)
    assert capsys.readouterr().err.splitlines() == said
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert "events/text_summary" in board.Tags()["tensors"]


def test_a_run_continues_while_nothing_can_be_written(tmp_path, capsys):
    config = tiny_config(tmp_path, training={"steps": 100})
    tracker = Tracker(config, Ranks(), 0)
    with no_file_longer_than(1500):
        for step in range(1, 61):
            tracker.log(step, SCALARS)
            assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n"), "no reader ever sees a torn line"
            tracker.show(step, "evaluation/sample", "text " * 100)
            tracker.show(step, "quality/map", torch.zeros(20, 20, 3, dtype=torch.uint8))
        tracker.event(60, "a failed save")
    for step in range(61, 101):
        tracker.log(step, SCALARS)
    tracker.__exit__(None, None, None)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(1, 101))
    assert [event["message"] for event in lines(tmp_path / "events.jsonl")] == ["a failed save"]
    said = capsys.readouterr().err
    assert said.count("metrics.jsonl cannot be written") == 1 == said.count("metrics.jsonl can be written again")
    assert "bytes are free" in said and "no line is missing" in said
    assert said.count("TensorBoard is switched off") == 1


def test_a_run_can_start_and_end_on_a_full_disk(tmp_path, capsys):
    config = tiny_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with no_file_longer_than(0), Tracker(config, Ranks(), 0) as tracker:
        tracker.log(1, SCALARS)
    assert (tmp_path / "config.json").read_text() == "{}", "the old one or the whole new one"
    said = capsys.readouterr().err
    assert "config.json cannot be written" in said and "1 lines could not be written and are lost" in said
    with Tracker(config, Ranks(), 0):
        assert Config.model_validate_json((tmp_path / "config.json").read_text()) == config


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_that_is_gone_ends_nothing(tmp_path, monkeypatch, terminal):
    class Gone(io.StringIO):
        def isatty(self) -> bool:
            return terminal

        def write(self, text: str) -> int:
            if gone:
                raise OSError(errno.EIO, "Input/output error")
            return len(text)

    gone = False
    monkeypatch.setattr(sys, "stderr", Gone())
    with Tracker(tiny_config(tmp_path), Ranks(), 0) as tracker:
        gone = True
        for step in range(1, 21):
            tracker.log(step, SCALARS)
        tracker.say("hello")
        tracker.event(3, "a spike")
    assert len(lines(tmp_path / "metrics.jsonl")) == 20 and len(lines(tmp_path / "events.jsonl")) == 1


def test_other_ranks_write_nothing(tmp_path):
    with Tracker(tiny_config(tmp_path / "run"), Ranks(rank=1, world_size=2), 0) as tracker:
        tracker.log(1, SCALARS)
        tracker.show(1, "evaluation/sample", "text")
        tracker.event(1, "nothing")
        tracker.say("hello")
    assert not (tmp_path / "run").exists()


def test_without_a_terminal_a_line_has_every_held_out_metric(tmp_path, capsys):
    with Tracker(tiny_config(tmp_path), Ranks(), 0) as tracker:
        tracker.log(1, SCALARS | {"evaluation/loss": 0.25, "evaluation/accuracy": 0.5, "quality/lsh/utility": 1.0})
    assert "tokens/s, held-out loss 0.2500, accuracy 0.5000, " in capsys.readouterr().err


@pytest.mark.parametrize(("tokenizer", "unit"), [("bytes", "bits/dim"), ("books.model", "bits/token")])
def test_the_progress_line_names_the_unit_of_its_bits(tmp_path, capsys, tokenizer, unit):
    config = tiny_config(tmp_path)
    config = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": tokenizer})})
    with Tracker(config, Ranks(), 0) as tracker:
        tracker.log(1, SCALARS | {"train/bits_per_dim": 2.0, "evaluation/bits_per_dim": 2.5})
    line = capsys.readouterr().err
    assert f"2.0000 {unit}" in line and f"held-out 2.5000 {unit}" in line


PICTURE = torch.zeros(4, 4, 3, dtype=torch.uint8)


def write(config, steps):
    with Tracker(config, Ranks(), steps[0] - 1) as tracker:
        for step in steps:
            tracker.log(step, {**SCALARS, "train/loss": float(step)})
        tracker.show(steps[-1], "evaluation/sample", "a sample")
        tracker.show(steps[-1], "quality/map", PICTURE)


def test_mlflow_has_every_step_once_and_a_restart_continues_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = tiny_config(tmp_path / "run", logging={"sink": "mlflow"})
    write(config, [1, 2])
    with mlflow.start_run(experiment_id="0") as other:  # a notebook's own
        write(config, [3])
        assert mlflow.active_run().info.run_id == other.info.run_id
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("megasparse").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    result = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"config.json", "evaluation", "quality"} <= result


def test_wandb_has_every_step_offline_under_one_name(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = tiny_config(tmp_path / "run", logging={"sink": "wandb"})
    logged = []
    monkeypatch.setattr(wandb.Run, "log", lambda run, values: logged.append(values))
    write(config, [1, 2, 3])
    wandb.teardown()  # waits for wandb's own process, which writes the file, as the end of a program does
    files = {file.name for file in (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")}
    assert len(files) == 1 and (tmp_path / "run" / "wandb_id").read_text().strip() in files.pop()
    assert [(v["step"], v["train/loss"]) for v in logged if "train/loss" in v] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_nothing_of_them_is_imported_unless_asked_for(tmp_path, monkeypatch):
    real = builtins.__import__

    def watch(name, *rest):
        assert name.partition(".")[0] not in ("wandb", "mlflow")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", watch)
    write(tiny_config(tmp_path / "run"), [1])


def test_a_failing_backend_is_disabled_and_the_run_continues(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://user:SECRET@nowhere")
    write(tiny_config(tmp_path / "run", logging={"sink": "mlflow"}), [1, 2])
    said = capsys.readouterr().err
    assert said.count("mlflow is switched off") == 1 and "SECRET" not in said
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_missing_package_is_named_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"logging.sink: \"mlflow\" is not installed"):
        Tracker(tiny_config(tmp_path / "run", logging={"sink": "mlflow"}), Ranks(), 0)
