"""Weights & Biases and MLflow beside TensorBoard: what they were given is in their own files, and nothing is sent."""

import builtins

import mlflow
import pytest
import torch
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from megasparse.errors import ConfigError
from megasparse.training.ranks import Ranks
from megasparse.training.reporting.monitor import Monitor
from megasparse.training.reporting.sinks import run_id
from tests.helpers.tiny import tiny_config

SCALARS = {"train/loss": 1.25, "optimizer/learning_rate": 1e-3, "speed/tokens_per_second": 10.0}
PICTURE = torch.zeros(4, 4, 3, dtype=torch.uint8)


def write(config, steps):
    with Monitor(config, Ranks(), steps[0] - 1) as monitor:
        for step in steps:
            monitor.write(step, {**SCALARS, "train/loss": float(step)})
        monitor.text(steps[-1], "evaluation/sample", "a sample")
        monitor.image(steps[-1], "quality/map", PICTURE)


def test_mlflow_has_every_step_once_and_a_restart_goes_on_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = tiny_config(tmp_path / "run", logging={"sink": "mlflow"})
    write(config, [1, 2])
    write(config, [3])
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("megasparse").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    found = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"config.json", "evaluation", "quality"} <= found


def records(data):
    """The records of LevelDB's log format: blocks of 32 KiB, behind wandb's header of 7 bytes, whose records, begun by
    checksum, size and type, are whole (type 1) or parts of one (2 first, 3, 4 last).
    """
    place, whole = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:  # the end of a block is left empty
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


def history(folder):
    """The history of wandb's offline files, as (step, loss)."""
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            items = {"/".join([item.key, *item.nested_key]): item.value_json for item in record.history.item}
            if "/train/loss" in items or "train/loss" in items:
                found.append((items.get("step") or items["/step"], items.get("train/loss") or items["/train/loss"]))
    return found


def test_wandb_has_every_step_offline_under_one_name(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = tiny_config(tmp_path / "run", logging={"sink": "wandb"})
    write(config, [1, 2, 3])
    wandb.teardown()  # waits for wandb's own process, which writes the file, as the end of a program does
    files = {file.name for file in (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")}
    assert len(files) == 1 and run_id(tmp_path / "run" / "wandb_id") in files.pop()
    assert sorted((int(step), float(loss)) for step, loss in history(tmp_path / "run")) == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
    ]


def test_nothing_of_them_is_imported_unless_asked_for(tmp_path, monkeypatch):
    real = builtins.__import__

    def watch(name, *rest):
        assert name.partition(".")[0] not in ("wandb", "mlflow")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", watch)
    write(tiny_config(tmp_path / "run"), [1])


def test_trouble_switches_a_sink_off_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    write(tiny_config(tmp_path / "run", logging={"sink": "mlflow"}), [1, 2])
    assert capsys.readouterr().err.count("mlflow is switched off") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_missing_package_is_named_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"logging.sink: \"mlflow\" is not installed"):
        Monitor(tiny_config(tmp_path / "run", logging={"sink": "mlflow"}), Ranks(), 0)
