"""Sweeps over a stand-in for launch/finetune.py, which knows what each run is worth without training it."""

import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megasparse.cli.main import door
from megasparse.config.extends import read_values
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.load import build_settings
from megasparse.errors import ConfigError
from megasparse.runs import sweep
from tests.helpers.commands import refused

main = door("sweep")

ROOT = Path(__file__).parents[2]
STAND_IN = """
import json, os, pathlib, signal, sys, time

words = sys.argv[1:]
assert words[0] == "--config" and words[2::2] == ["--set"] * (len(words) // 2 - 1), words
settings = dict(word.split("=", 1) for word in words[3::2])
settings = {key: json.loads(value) for key, value in settings.items()}
folder = pathlib.Path(settings["run.directory"])
folder.mkdir(parents=True, exist_ok=True)
with open(folder / "starts", "a") as file:
    file.write(json.dumps(settings) + chr(10))
print("step 1")
if settings.get("task.limit") == 13:
    print("error: task.limit: 13 is bad luck", file=sys.stderr)
    print()
    sys.exit(2)
if settings.get("task.limit") == 14:
    sys.exit(0)
if settings.get("task.limit") == 15 and not (folder / "checkpoint").exists():
    def save(number, frame):
        time.sleep(0.2)
        (folder / "checkpoint").write_text("")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    (folder / "ready").write_text("")
    time.sleep(60)
value = settings["optimizer.learning_rate"] * 10000 + settings["training.epochs"] / 100 - settings["run.seed"] / 1000
best = {"step": 7, "metric": "accuracy", "value": value, "scalars": {"evaluation/f1": value / 2}}
if settings.get("task.limit") == 16:
    best["value"] = None
(folder / "best.json").write_text(json.dumps(best))
"""
GRID = {"optimizer.learning_rate": [1e-5, 2e-5], "training.epochs": [3, 4]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With the launcher's stand-in, a configuration and a grid; signal handlers are put back afterwards."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(sweep, "LAUNCHER", [str(tmp_path / "stand_in.py")])
    (tmp_path / "config.json").write_text(json.dumps({"task": {"name": "rte"}}))
    write_grid(tmp_path, GRID)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def write_grid(folder, grid):
    (folder / "grid.json").write_text(json.dumps(grid))


def words(folder, *more):
    given = ["--config", folder / "config.json", "--grid", folder / "grid.json", "--output", folder / "out", *more]
    return [str(word) for word in given]


def run(folder, *more):
    """The sweep's exit code."""
    try:
        main(words(folder, *more))
    except SystemExit as end:
        return end.code
    return 0


def problem(folder, capsys, *more):
    return refused(capsys, main, *words(folder, *more))


def written(folder):
    return json.loads((folder / "out" / "sweep.json").read_text())


def starts(folder):
    found = (folder / "out").rglob("starts")
    return {str(file.parent.relative_to(folder / "out")): file.read_text().splitlines() for file in found}


def test_every_combination_runs_on_every_seed_and_the_best_mean_is_told(folder, capsys):
    assert run(folder, "--seeds", 3, "--set", 'task.source="a b"') == 0
    ran = starts(folder)
    pairs = list(itertools.product(GRID["optimizer.learning_rate"], GRID["training.epochs"]))
    assert len(ran) == len(pairs) * 3 and all(len(lines) == 1 for lines in ran.values())
    want = {(rate, epochs, seed) for rate, epochs in pairs for seed in range(3)}
    got = [json.loads(lines[0]) for lines in ran.values()]
    assert {(each["optimizer.learning_rate"], each["training.epochs"], each["run.seed"]) for each in got} == want
    assert all(each["task.source"] == "a b" for each in got)
    result = written(folder)
    assert result["best"] == {"optimizer.learning_rate": 2e-5, "training.epochs": 4}
    for each in result["combinations"]:
        rate, epochs = each["settings"].values()
        values = [rate * 10000 + epochs / 100 - seed / 1000 for seed in range(3)]
        assert each["mean"] == pytest.approx(statistics.mean(values))
        assert each["deviation"] == pytest.approx(0.001)  # of 0, 1 and 2 thousandths, by n - 1
        assert [run["scalars"]["evaluation/f1"] for run in each["runs"]] == pytest.approx([v / 2 for v in values])
    means = [each["mean"] for each in result["combinations"]]
    assert means == sorted(means, reverse=True)
    reported = capsys.readouterr()
    rows = reported.out.splitlines()
    assert rows[0] == "| combination | accuracy, mean | standard deviation | seeds | |"
    assert rows[2] == "| learning_rate=2e-05,epochs=4 | 0.2390 | 0.0010 | 3 | best |"
    assert len(rows) == 6 and all(row.endswith("| 3 |  |") for row in rows[3:])
    assert "12/12 learning_rate=2e-05,epochs=4 seed 2: accuracy 0.2380" in reported.err


def test_the_lowest_mean_of_an_error_is_the_best(folder, capsys, monkeypatch):
    """Whether best.json names it as the launcher does or not."""
    monkeypatch.setattr(sweep, "LOWER_IS_BETTER", ("accuracy",))
    for name in ("accuracy", "evaluation/accuracy"):
        stand_in = folder / "stand_in.py"
        stand_in.write_text(stand_in.read_text().replace('"metric": "accuracy"', f'"metric": "{name}"'))
        shutil.rmtree(folder / "out", ignore_errors=True)
        assert run(folder, "--seeds", 2) == 0
        result = written(folder)
        assert result["best"] == {"optimizer.learning_rate": 1e-5, "training.epochs": 3}
        means = [each["mean"] for each in result["combinations"]]
        assert means == sorted(means) and len(set(means)) == 4
        rows = capsys.readouterr().out.splitlines()
        assert rows[2] == "| learning_rate=1e-05,epochs=3 | 0.1295 | 0.0007 | 2 | best |"


def test_what_is_done_is_not_repeated_and_more_is_added(folder, capsys):
    assert run(folder) == 0
    name = "learning_rate=1e-05,epochs=3/seed0"
    (folder / "out" / name / "best.json").unlink()
    write_grid(folder, {**GRID, "training.epochs": [3, 4, 5]})
    assert run(folder, "--seeds", 2) == 0
    ran = {place: len(lines) for place, lines in starts(folder).items()}
    assert ran.pop(name) == 2 and set(ran.values()) == {1} and len(ran) == 11
    assert capsys.readouterr().err.count("(done before)") == 3


def test_a_failed_run_is_told_by_its_last_line_and_the_others_go_on(folder, capsys):
    write_grid(folder, {"task.limit": [0, 13], "optimizer.learning_rate": [1e-5], "training.epochs": [3]})
    assert run(folder, "--seeds", 2) == 2
    reported = capsys.readouterr()
    reason = "exit code 2: error: task.limit: 13 is bad luck"
    assert f"3/4 limit=13 seed 0: failed: {reason}" in reported.err
    assert reported.err.splitlines()[-1].startswith("error: 2 of 4 runs failed")
    assert "| limit=13 |  |  | 0 | 2 failed |" in reported.out
    assert "| limit=0 | 0.1295 | 0.0007 | 2 | best |" in reported.out
    assert written(folder)["combinations"][1]["failed"] == {"0": reason, "1": reason}
    assert run(folder, "--seeds", 2) == 2
    ran = {place: len(lines) for place, lines in starts(folder).items()}
    assert ran == {"limit=0/seed0": 1, "limit=0/seed1": 1, "limit=13/seed0": 2, "limit=13/seed1": 2}


@pytest.mark.parametrize("limit, reason", [(14, "it was stopped before its end"), (16, "best.json has no result")])
def test_a_run_without_a_result_has_failed(folder, capsys, limit, reason):
    write_grid(folder, {**GRID, "task.limit": [limit]})
    assert run(folder) == 2
    assert capsys.readouterr().err.count(reason) == 4
    assert written(folder)["best"] is None


def test_a_combination_with_a_failed_seed_is_not_the_best(folder):
    assert run(folder, "--seeds", 2) == 0
    best = folder / "out" / "learning_rate=2e-05,epochs=4" / "seed1" / "best.json"
    best.write_text('{"step": 7, "metric": "accuracy", "value": null}')
    assert run(folder, "--seeds", 2) == 2
    assert written(folder)["best"] == {"optimizer.learning_rate": 2e-5, "training.epochs": 3}


def test_an_interrupted_sweep_lets_its_run_save_and_takes_it_up_again(folder):
    write_grid(folder, {**GRID, "task.limit": [15]})
    program = f"from megasparse.runs import sweep; sweep.LAUNCHER = {[str(folder / 'stand_in.py')]!r}; "
    program += "from megasparse.cli.main import door; door('sweep')()"
    command = [sys.executable, "-c", program, *words(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = folder / "out" / "learning_rate=1e-05,epochs=3" / "seed0"
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (first / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.terminate()
    reported = process.communicate(timeout=30)[1]
    assert process.returncode == 130 and reported.splitlines()[-1] == "interrupted"
    assert (first / "checkpoint").exists() and not (first / "best.json").exists()
    assert list(starts(folder)) == ["learning_rate=1e-05,epochs=3/seed0"]
    for rate, epochs in itertools.product(("1e-05", "2e-05"), (3, 4)):
        other = folder / "out" / f"learning_rate={rate},epochs={epochs}" / "seed0"
        other.mkdir(parents=True, exist_ok=True)
        (other / "checkpoint").touch()
    assert run(folder) == 0
    assert len(starts(folder)[str(first.relative_to(folder / "out"))]) == 2
    assert len(written(folder)["combinations"][0]["runs"]) == 1


def test_a_dry_run_lists_the_commands_and_does_nothing(folder, capsys):
    assert run(folder, "--seeds", 2, "--dry-run", "--set", "task.source=a b") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and not (folder / "out").exists()
    assert "'task.source=a b' --set optimizer.learning_rate=1e-05 --set training.epochs=3 --set run.seed=0" in lines[0]


def test_names_are_folders_that_no_other_settings_have():
    given = [{"start.attention": {"pattern": ["yoso"], "yoso": {"hashes": hashes}}} for hashes in (16, 32)]
    given += [{"a.rate": 1, "b.rate": 2}, {"a.rate": 2, "b.rate": 1}, {"b.rate": 1, "a.rate": 2}, {"rate": "x/../y"}]
    names = [sweep.folder_name(each) for each in (*given, {"text": "y" * 300}, {"text": "y" * 301}, {})]
    assert len(set(names)) == len(names)
    assert all("/" not in name and 0 < len(name) < 120 for name in names)
    assert sweep.folder_name({"optimizer.learning_rate": 1e-5}) == "learning_rate=1e-05"


def test_a_folder_of_another_sweep_is_refused(folder, capsys):
    write_grid(folder, {**GRID, "training.micro_batch": [8]})
    assert run(folder) == 0
    assert "holds a sweep with other --set" in problem(folder, capsys, "--set", "task.limit=5")
    write_grid(folder, {**GRID, "training.micro_batch": [4]})
    assert "holds a sweep with other --set" in problem(folder, capsys)
    write_grid(folder, {**GRID, "training.micro_batch": [8]})
    (folder / "config.json").write_text("{}")
    assert "holds a sweep with another configuration" in problem(folder, capsys)


@pytest.mark.parametrize(
    "grid, reported",
    [
        ({"run.seed": [1]}, "grid.json run.seed: is set by the sweep itself"),
        ({"task.limit": 3}, "grid.json task.limit: 3 is no list of values"),
        ({"task.limit": []}, "grid.json task.limit: [] is no list of values"),
        ({"task.limit": [1, 2, 1]}, "grid.json task.limit: [1, 2, 1] has a value twice"),
        ([1], "grid.json: is no JSON object"),
    ],
)
def test_a_mistake_in_the_grid_is_told(folder, capsys, grid, reported):
    write_grid(folder, grid)
    assert reported in problem(folder, capsys)
    assert not (folder / "out").exists()


def test_a_mistake_in_the_command_is_told(folder, capsys):
    assert "--set training.epochs: is what the sweep varies" in problem(folder, capsys, "--set", "training.epochs=5")
    assert "--set run.seed: is what the sweep varies" in problem(folder, capsys, "--set", "run.seed=5")
    assert "--seeds: 0 is too few" in problem(folder, capsys, "--seeds", 0)
    (folder / "config.json").unlink()
    assert "config.json: cannot be read" in problem(folder, capsys)


@pytest.mark.parametrize("name", ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"])
@pytest.mark.parametrize("grid", ["lha_glue", "yoso_glue"])
def test_grids_of_the_papers_fit_the_configurations_of_glue(name, grid):
    values = read_values(f"finetune/glue_{name}")
    combinations = sweep.combine(sweep.load_grid(ROOT / f"configs/finetune/grids/{grid}.json"), [], 1)
    assert len(combinations) == {"lha_glue": 3 * 5 * 3, "yoso_glue": 3 * 4}[grid]
    for each in combinations:
        overrides = [f"{key}={json.dumps(value)}" for key, value in each.settings.items()]
        config = build_settings(values, overrides, FinetuneConfig)
        assert config.task.name == name and config.training.global_batch % config.training.micro_batch == 0
    with pytest.raises(ConfigError):
        build_settings(values, ["optimizer.learning_rat=1"], FinetuneConfig)
