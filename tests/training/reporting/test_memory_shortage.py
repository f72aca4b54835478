"""A run that exhausts memory ends with a table of its allocations."""

import json

import pytest
import torch

from megasparse.errors import MemoryShortage
from megasparse.model.build import build_model
from megasparse.settings.load import load_config
from megasparse.training.engines.plain import TorchEngine
from megasparse.training.reporting import memory
from megasparse.training.reporting.memory import is_out_of_memory
from tests.helpers.cases import together
from tests.helpers.tiny import tiny_config, tiny_run
from tests.helpers.trained import prepared, trained

SAID = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB"
ON_CPU = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"


@together(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError(SAID), True),
        (RuntimeError(ON_CPU), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error, is_one):
    assert is_out_of_memory(error) is is_one


def test_the_host_allocator_raises_the_recognised_message():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def fail_in_step(monkeypatch, step: int, error: Exception) -> None:
    backward, calls = TorchEngine._backward, []

    def failing(self, *arguments):
        calls.append(None)
        if len(calls) == step:
            raise error
        return backward(self, *arguments)

    monkeypatch.setattr(TorchEngine, "_backward", failing)


def test_a_memory_failure_prints_a_table_of_allocations(tmp_path, monkeypatch, capsys):
    """The counts follow the definition: fp32 weights, AdamW's two moments and its counters of steps."""
    data, run = prepared(tmp_path), tmp_path / "run"
    fail_in_step(monkeypatch, 3, torch.OutOfMemoryError(SAID))
    monkeypatch.setattr(memory, "resident_bytes", lambda: 1000)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 24)
    with pytest.raises(SystemExit) as ended:
        trained(data, run, ["local", "lsh"], 5)
    assert ended.value.code == MemoryShortage.exit_code == 7
    printed = capsys.readouterr().err
    counted = json.loads((run / "out-of-memory-rank-0.json").read_text())["counted"]
    config = load_config(str(run / "config.json"), [])
    sizes = [weight.numel() for weight in build_model(config.model, 0).parameters()]
    held = counted["held"]
    assert held["weights"] >= 4 * sum(sizes) and held["weights"] < 4.1 * sum(sizes) + 1000
    assert held["optimizer"] == 8 * sum(sizes) + 4 * len(sizes)
    assert counted["limit"] == 1024
    table = [line.split() for line in printed.splitlines()]
    for kind in ("weights", "gradients", "optimizer"):
        assert [kind, f"{held[kind] / 1e9:.2f}", "GB"] in table
    line = printed.splitlines()[-1]
    assert line.startswith("error: rank 0 on cpu is out of memory (CUDA out of memory. Tried to allocate 2.50 GiB")
    assert "training.micro_batch" in line and str(run / "out-of-memory-rank-0.json") in line
    assert "Traceback" not in printed


def test_other_errors_stay_as_they_are(tmp_path, monkeypatch):
    fail_in_step(monkeypatch, 1, RuntimeError("size mismatch"))
    with pytest.raises(RuntimeError, match="size mismatch"), tiny_run(tiny_config(tmp_path / "run")) as run:
        run.engine.train_step(next(iter(run.batches)).micro_batches, 1, 0.1)
