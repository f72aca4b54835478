"""The trial step: correct measurements, no traces, and a step of 65,536 tokens in little memory."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megasparse.cli.main import main
from megasparse.model.build import build_model
from megasparse.planning import dry_run as dry_run_module
from megasparse.planning.dry_run import DryRun, dry_run
from megasparse.planning.flops import model_flops_per_token
from megasparse.planning.passes import dummy_records
from megasparse.settings.load import build_config

ROOT = Path(__file__).parents[2]
VALUES = {
    "run": {"directory": "runs/never", "device": "cpu"},
    "model": {
        **{"max_length": 64, "layers": 2, "d_model": 32, "d_ff": 64, "heads": 4},
        "attention": {"pattern": ["local", "lsh"], "local": {"chunk": 16}, "lsh": {"chunk": 16}},
    },
    "data": {"path": "no/data", "sequence_length": 64},
    "training": {"global_batch": 6, "micro_batch": 2},
}


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(values, *overrides):
    config = build_config(values, overrides)
    return config, dry_run(config)


def test_it_measures_one_step_and_writes_nothing(empty_folder):
    config, found = run(VALUES)
    assert list(empty_folder.iterdir()) == []
    assert found.parameters == sum(p.numel() for p in build_model(config.model, 0).parameters())
    assert found.flops_per_step == model_flops_per_token(config.model, 64) * 6 * 64
    assert (
        found.seconds > 0 and found.rank_seconds > 0 and abs(found.loss - math.log(256)) < 2
    )  # random weights know nothing
    for word in (f"{found.parameters:,}", "6 sequences of 64 tokens", "micro-batch of 2 on cpu"):
        assert word in found.lines(config)


def test_the_training_time_is_that_of_one_process_and_of_the_ranks_that_share_the_batch():
    """Three micro-batches per step, 100 steps."""
    config = build_config(VALUES, ["training.steps=100"])
    trial = DryRun(1, 1.0, 1, seconds=60.0, ranks=3, rank_seconds=12.0, loss=1.0, device="cpu")
    assert "5.0 hours in one process, 20 minutes with torchrun --nproc-per-node 3" in trial.lines(config)
    assert "torchrun" not in replace(trial, ranks=1).lines(config)


def test_the_first_step_is_not_timed(empty_folder, monkeypatch):
    config = build_config(VALUES, ["data.sequence_length=32", "evaluation.sequence_length=64"])
    engine, evaluated = SimpleNamespace(module=torch.nn.Linear(1, 1), close=lambda: None), []
    clock, engine.steps = [0.0], 0

    def step(*_):
        clock[0] += 10 if engine.steps == 0 else 2
        engine.steps += 1
        return SimpleNamespace(loss=float(engine.steps))

    engine.train_step, engine.evaluate = step, lambda tokens, rng: evaluated.append(tokens.shape)
    monkeypatch.setattr(dry_run_module, "trial_engine", lambda *_: (engine, None))
    monkeypatch.setattr(dry_run_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(dry_run_module, "usable_cores", lambda: 2)
    result = dry_run(config)
    assert (result.seconds, result.rank_seconds, result.ranks, result.loss) == (2.0, 2.0, 1, 1.0)
    assert evaluated == [(1, 64)], "the memory of longer windows of evaluation is included"


def test_an_encoder_decoder_takes_a_step_on_padded_records(empty_folder):
    source = {"length": 24, "attention": {"pattern": ["full"]}}
    model = {**VALUES["model"], "kind": "encoder_decoder", "source": source, "vocabulary": 300, "padding_token": 299}
    config, found = run({**VALUES, "model": model})
    assert abs(found.loss - math.log(300)) < 2
    tokens = dummy_records(config.model, 5, 64, seed=1)
    assert tokens.shape == (5, 64) and 280 < tokens[tokens < 299].max() < 299
    padding = [*range(21, 24), *range(59, 64)]
    assert all((row == 299).nonzero().flatten().tolist() == padding for row in tokens)


def test_peak_memory_equals_weights_gradients_and_optimizer(tmp_path):
    """In a separate process: in this one the allocator would reuse memory of earlier tests."""
    wide = {"model": {**VALUES["model"], "d_model": 512, "d_ff": 8192}, "training": {"global_batch": 6}}
    (tmp_path / "config.json").write_text(json.dumps({**VALUES, **wide}))
    command = [sys.executable, "launch/pretrain.py", "--config", str(tmp_path / "config.json"), "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("warning: training would end with this error: ") and "no data here" in done.stderr
    parameters = int(re.search(r"parameters +([\d,]+)", done.stdout)[1].replace(",", ""))
    peak_bytes = float(re.search(r"peak memory +([\d.]+) GB", done.stdout)[1]) * 1e9
    states = 4 * 4 * parameters  # fp32 weights, gradients, and the two moments of AdamW
    assert 0.95 * states < peak_bytes < 1.6 * states  # beside them: buffers of the update, and activations


def test_a_dry_run_ends_at_once_on_a_signal(empty_folder):
    (empty_folder / "config.json").write_text(json.dumps(VALUES))
    handler = signal.getsignal(signal.SIGTERM)
    main(["pretrain", "--config", "config.json", "--dry-run"])
    assert signal.getsignal(signal.SIGTERM) is handler, "there is nothing to save"


REDUCED = ["model.layers=4", "training.global_batch=1"]  # one period of the pattern: local, local, LSH, local


def peak_bytes(*command: str) -> int:
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=os.environ | {"PYTHONPATH": "."})
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return usage.ru_maxrss * 1024


def pretrain(*settings: str) -> list[str]:
    sets = [part for setting in (*REDUCED, 'run.device="cpu"', *settings) for part in ("--set", setting)]
    return ["launch/pretrain.py", "--config", "configs/reformer_64k.json", *sets]


@pytest.mark.soak
def test_a_step_of_65536_tokens_on_real_shards_in_20_gb(tmp_path):
    """ZeRO 3 with weights and optimizer in CPU memory, as configured: minutes on two cores."""
    text, data = tmp_path / "text.txt", tmp_path / "data"
    text.write_text("".join(f"{number} bottles of beer on the wall, " for number in range(20_000)))
    peak_bytes("tools/prepare_data.py", "text", "--source", str(text), "--output", str(data))
    paths = [f'data.path="{data}"', f'run.directory="{tmp_path / "run"}"']
    assert peak_bytes(*pretrain("training.steps=1", *paths)) < 20e9
    assert (tmp_path / "run" / "checkpoints" / "00000001" / "manifest.json").exists()
