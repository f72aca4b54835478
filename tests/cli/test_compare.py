"""The comparison of mechanisms: one tiny one from end to end, and what wrong requests answer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megasparse.errors import ConfigError
from megasparse.runs.comparison import chosen, load, table

ROOT = Path(__file__).parents[2]


def small_comparison(folder):
    config = json.loads((ROOT / "configs/duplication_small.json").read_text())
    config["model"] |= {"d_model": 16, "max_length": 32, "score_from": 16}
    config["data"] = {"path": str(folder / "data"), "sequence_length": 32}
    config["training"] |= {"steps": 3}
    config["optimizer"] |= {"warmup_steps": 1}
    (folder / "config.json").write_text(json.dumps(config))
    comparison = {
        "prepare": ["duplication", "--length", "32", "--symbols", "7", "--sequences", "64"],
        "config": str(folder / "config.json"),
        "evaluate": ["--limit", "2"],
        "arms": {
            "full": ['model.attention.pattern=["full"]'],
            "local": ['model.attention.pattern=["local"]', "training.steps=2"],
        },
    }
    comparison["prepare"] += ["--output", str(folder / "data")]
    (folder / "small.json").write_text(json.dumps(comparison))
    return folder / "small.json"


def test_arms_are_trained_and_evaluated_once(tmp_path):
    path = small_comparison(tmp_path)
    command = [
        sys.executable,
        "tools/compare_attention.py",
        str(path),
        "--jobs",
        "2",
        "--output",
        str(tmp_path / "runs"),
    ]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    assert "| full |" in first.stdout and "| local |" in first.stdout
    steps = {n: len((tmp_path / f"runs/{n}-0/metrics.jsonl").read_text().splitlines()) for n in ("full", "local")}
    assert steps == {"full": 3, "local": 2}
    before = (tmp_path / "runs/full-0/evaluation.json").stat().st_mtime_ns
    again = subprocess.run([*command, "--arms", "full"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "| full |" in again.stdout and "| local |" not in again.stdout
    assert (tmp_path / "runs/full-0/evaluation.json").stat().st_mtime_ns == before


def test_the_table_is_sorted_and_shows_the_spread():
    run = {"accuracy": 0.5, "loss": 1.0, "seconds": 10.0}
    lines = table({"worse": [run, run | {"accuracy": 0.3}], "better": [run | {"accuracy": 0.9}, run]})
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| better", "| worse"]
    assert "40.00 ± 14.14" in lines[3]


def test_wrong_requests(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "missing.json")
    (tmp_path / "other.json").write_text('{"arms": {}}')
    with pytest.raises(ConfigError, match="arms, config, evaluate, prepare"):
        load(tmp_path / "other.json")
    with pytest.raises(ConfigError, match='no arm "lsh"'):
        chosen(["lsh"], {"full": []})
    assert chosen(None, {"full": [], "local": []}) == ["full", "local"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs/comparisons").glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_comparison_loads(path):
    from megasparse.config.load import load_config

    comparison = load(path)
    for changes in comparison["arms"].values():
        load_config(ROOT / comparison["config"], changes)
