"""The configuration configs/reformer_64k.json, only depth and sequences a step reduced, trains in the memory of a
desktop machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REDUCED = ["model.layers=4", "training.global_batch=1"]  # one period of the pattern: local, local, LSH, local


def peak_bytes(*command: str) -> int:
    """Largest resident memory of `python command`, which must succeed."""
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
