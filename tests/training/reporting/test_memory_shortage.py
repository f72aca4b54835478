"""A run that memory does not suffice for ends with what held it, and with settings that would fit."""

import json
import re

import pytest
import torch

from megasparse.config.load import load_config
from megasparse.errors import ConfigError, MemoryShortage
from megasparse.model.build import build_model
from megasparse.training.engines.plain import TorchEngine
from megasparse.training.reporting import memory_shortage
from megasparse.training.reporting.memory_shortage import (
    CountedMemory,
    PlannedMemory,
    changes_that_fit,
    is_out_of_memory,
    requested_bytes,
)
from tests.helpers.tiny import tiny_config, tiny_run
from tests.helpers.trained import prepared, trained

SAID = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB"
ON_CPU = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"


@pytest.mark.parametrize(
    ("error", "is_one", "requested"),
    [
        (torch.OutOfMemoryError(SAID), True, 5 << 29),
        (RuntimeError(ON_CPU), True, 4096),
        (MemoryError(), True, 0),
        (RuntimeError("CUDA error: out of memory"), True, 0),
        (RuntimeError("size mismatch"), False, 0),
        (ValueError("can't allocate memory"), False, 0),
    ],
)
def test_what_counts_as_out_of_memory(error, is_one, requested):
    assert is_out_of_memory(error) is is_one
    assert requested_bytes(error) == requested


def test_torch_says_of_the_host_what_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value) and requested_bytes(caught.value) == 1 << 62


def invalid() -> int:
    raise ConfigError("key", "is wrong", "Correct it")


def test_the_first_three_changes_that_fit_are_named_with_what_the_plan_missed():
    """100 bytes planned, 110 + 40 needed: 50 were missed, of 120 that there can be."""
    peaks = {"too little": 71, "fits": 70, "none": 100, "more": 150, "second": 10, "third": 60, "fourth": 1}
    changes = [("invalid", invalid), *((name, lambda peak=peak: peak) for name, peak in peaks.items())]
    planned = PlannedMemory({"weights": 30, "gradients": 20, "optimizer": 40, "other": 10}, changes)
    counted = CountedMemory({"weights": 30, "gradients": 0, "optimizer": 40, "other": 40}, requested=40, limit=120)
    asked: list[str] = []
    fitting = changes_that_fit(planned, counted, asked.append)
    assert fitting == {"fits": 120, "second": 60, "third": 110}
    assert [each.split()[-1] for each in asked][-1] == "third", "the others are not planned"


def fail_in_step(monkeypatch, step: int, error: Exception) -> None:
    forward, calls = TorchEngine._forward, []

    def failing(self, *arguments):
        calls.append(None)
        if len(calls) == step:
            raise error
        return forward(self, *arguments)

    monkeypatch.setattr(TorchEngine, "_forward", failing)


def test_a_pretraining_ends_with_a_table_and_three_settings_that_it_can_take(tmp_path, monkeypatch, capsys):
    """The counts are those of the definition: fp32 weights, AdamW's two moments and its counters of steps."""
    data, run = prepared(tmp_path), tmp_path / "run"
    fail_in_step(monkeypatch, 3, torch.OutOfMemoryError(SAID))
    with pytest.raises(SystemExit) as ended:
        trained(data, run, ["local", "lsh"], 5)
    assert ended.value.code == MemoryShortage.exit_code == 7
    said = capsys.readouterr().err
    facts = json.loads((run / "out-of-memory-rank-0.json").read_text())
    config = load_config(str(run / "config.json"), [])
    sizes = [weight.numel() for weight in build_model(config.model, 0).parameters()]
    held = facts["counted"]["held"]
    assert held["weights"] >= 4 * sum(sizes) and held["weights"] < 4.1 * sum(sizes) + 1000
    assert held["optimizer"] == 8 * sum(sizes) + 4 * len(sizes)
    assert facts["planned"]["optimizer"] == 8 * sum(sizes) and facts["planned"]["weights"] == 4 * sum(sizes)
    assert facts["counted"]["requested"] == 5 << 29
    table = [line.split() for line in said.splitlines()]
    for kind in ("weights", "gradients", "optimizer"):
        planned, counted = facts["planned"][kind] / 1e9, held[kind] / 1e9
        assert [kind, f"{planned:.2f}", "GB", f"{counted:.2f}", "GB"] in table
    assert len(facts["fitting"]) == 3
    line = said.splitlines()[-1]
    assert line.startswith("error: rank 0 on cpu is out of memory (CUDA out of memory. Tried to allocate 2.50 GiB")
    assert "; ".join(facts["fitting"]) in line and str(run / "out-of-memory-rank-0.json") in line
    assert "Traceback" not in said
    for change in facts["fitting"]:
        assert re.fullmatch(r"[a-z_.]+=\S+", change)
        load_config(str(run / "config.json"), [change])


def test_where_nothing_is_free_no_change_is_promised(tmp_path, monkeypatch, capsys):
    data = prepared(tmp_path)
    fail_in_step(monkeypatch, 1, MemoryError())
    monkeypatch.setattr(memory_shortage, "resident_bytes", lambda: 1000)
    monkeypatch.setattr(memory_shortage, "available_bytes", lambda device: 24)
    with pytest.raises(SystemExit):
        trained(data, tmp_path / "run", ["local"], 5)
    facts = json.loads((tmp_path / "run" / "out-of-memory-rank-0.json").read_text())
    assert facts["counted"]["limit"] == 1024 and facts["fitting"] == {}
    assert "No single change is predicted to fit" in capsys.readouterr().err


def test_a_run_without_a_plan_reports_its_counts(tmp_path, monkeypatch, capsys):
    fail_in_step(monkeypatch, 1, MemoryError("no more"))
    with pytest.raises(MemoryShortage, match="no more"), tiny_run(tiny_config(tmp_path / "run")) as run:
        run.engine.train_step(next(iter(run.batches)).micro_batches, 1, 0.1)
    assert "the plan failed: there is none for this kind of run" in capsys.readouterr().err


def test_other_errors_stay_as_they_are(tmp_path, monkeypatch):
    fail_in_step(monkeypatch, 1, RuntimeError("size mismatch"))
    with pytest.raises(RuntimeError, match="size mismatch"), tiny_run(tiny_config(tmp_path / "run")) as run:
        run.engine.train_step(next(iter(run.batches)).micro_batches, 1, 0.1)
