"""Comparison of attention mechanisms on one task: arms are trained and evaluated alike by ordinary commands."""

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, cycle
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from megasparse.config.files import read_values
from megasparse.data.corpora.download import fetch_wheel
from megasparse.errors import ConfigError, UserError
from megasparse.files import open_file, read_file
from megasparse.runs.report import read_lines

KEYS = {"prepare", "config", "evaluate", "arms"}
METRICS, HELD_OUT, STEP_SECONDS = "metrics.jsonl", "evaluation/bits_per_dim", "speed/step_seconds"
Row = dict[str, float]


class ArmRun(NamedTuple):
    """Commands of one arm with one seed."""

    arm: str
    folder: Path
    training: list[str]
    evaluations: dict[str, list[str]]
    """"arm", or "arm; evaluation" -> words of the command; the last is the result's path."""


def load(name: str | Path, corpora: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return corpus -> comparison for all corpora of a file or those in `corpora`; a single corpus is named "". A
    corpus provides `prepare` and `wheels`, and settings (`set`) added to every arm. Every arm trains on the folder that
    `prepare` writes, unless it sets `data.path`.
    """
    values, parts = read_values(name), {}
    choices = values.pop("corpora", {"": {}})
    for corpus in chosen(corpora, choices, "--corpora"):
        part = values | choices[corpus]
        settings = part.pop("set", [])
        if part.keys() - {"wheels"} != KEYS:
            hint = f"Give it exactly the keys {', '.join(sorted(KEYS))}, or `corpora` instead of `prepare`"
            raise ConfigError(f"{name}: {corpus}" if corpus else str(name), "not a comparison", hint)
        words = part["prepare"]
        path = [f"data.path={words[words.index('--output') + 1]}"] if "--output" in words[:-1] else []
        part["arms"] = {arm: [*path, *changes, *settings] for arm, changes in part["arms"].items()}
        part["evaluate"] = part["evaluate"] if isinstance(part["evaluate"], dict) else {"": part["evaluate"]}
        parts[corpus] = part
    return parts


def chosen(names: Sequence[str] | None, choices: dict[str, Any], option: str) -> list[str]:
    for name in names or []:
        if name not in choices:
            hint = f"Choose from {', '.join(choices)}" if any(choices) else "Remove it: there is only one corpus"
            raise ConfigError(option, f'unknown name "{name}"', hint)
    return list(names or choices)


def runs_of(
    comparison: dict[str, Any], output: Path, arms: Sequence[str] | None = None, seeds: Sequence[int] = (0,),
    overrides: Sequence[str] = (),
) -> list[ArmRun]:  # fmt: skip
    """Return the runs of a comparison with folders in `output`, seed by seed."""
    names, runs = chosen(arms, comparison["arms"], "--arms"), []
    from megasparse.settings.load import Config, load_config, load_settings

    load_settings(comparison["config"], overrides, Config, mechanisms=False)
    for seed in seeds:
        for arm in names:
            folder = output / f"{arm.replace(' ', '_')}-{seed}"
            changes = [f"run.directory={folder}", f"run.seed={seed}", "run.engine=torch", *comparison["arms"][arm]]
            load_config(comparison["config"], [*changes, *overrides])
            training = ["pretrain", "--config", comparison["config"]]
            training += [word for change in [*changes, *overrides] for word in ("--set", change)]
            evaluations = {}
            for name, words in comparison["evaluate"].items():
                result = folder / (f"evaluation-{name.replace(' ', '_')}.json" if name else "evaluation.json")
                label = f"{arm}; {name}" if name else arm
                options = [*words, "--allow-leaking-attention", "--json", str(result)]  # the table marks leaks
                evaluations[label] = ["evaluate", "--checkpoint", str(folder), *options]
            runs.append(ArmRun(arm, folder, training, evaluations))
    return runs


def train_all(comparison: dict[str, Any], runs: Sequence[ArmRun], log: Path, jobs: int = 1) -> dict[str, list[Row]]:
    """Train and evaluate unfinished runs, `jobs` at a time, each on one CPU thread. Returns label of
    `ArmRun.evaluations` -> one row per seed.
    """
    for wheel in comparison.get("wheels", []):
        fetch_wheel(**wheel)
    call("prepare-data", *comparison["prepare"], log=log)
    with ThreadPoolExecutor(jobs) as pool:
        rows = list(tqdm(pool.map(_train_and_evaluate, runs), total=len(runs), unit="run", disable=None))
    results: dict[str, list[Row]] = {}
    for label, row in chain.from_iterable(rows):
        results.setdefault(label, []).append(row)
    return results


def _train_and_evaluate(run: ArmRun) -> list[tuple[str, Row]]:
    missing = [words for words in run.evaluations.values() if not Path(words[-1]).exists()]
    if missing:
        tqdm.write(f"{run.folder}: training, see training.log there", file=sys.stderr)
        call(*run.training, log=run.folder / "training.log")
    for words in missing:
        call(*words, log=Path(words[-1]).with_suffix(".log"))
    steps, rows = list(read_lines(run.folder / METRICS)), []
    seconds = {"seconds": sum(step[STEP_SECONDS] for step in steps), "step_seconds": _quiet_step(steps)}
    for label, words in run.evaluations.items():
        result = json.loads(read_file(words[-1]))
        if result["protocol"].get("leaks"):
            label += " (leaks: not a code length)"
        rows.append((label, {"accuracy": result["accuracy"], "loss": result["nats"] / result["dims"], **seconds}))
    return rows


def call(*words: object, log: Path) -> None:
    """Run a subcommand of megasparse on one thread, with its output in `log`."""
    command = [sys.executable, "-m", "megasparse", *map(str, words)]
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}  # the error is the last line
    with open_file(log, "wb") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise UserError(f"megasparse {words[0]} failed with exit code {code}: {' '.join(last)} (full log: {log})")


def _quiet_step(steps: list[Row]) -> float:
    """Return seconds per step, the 5% quantile, which other load on the machine hardly affects."""
    return sorted(step[STEP_SECONDS] for step in steps)[len(steps) // 20]


def table(results: dict[str, list[Row]]) -> list[str]:
    """Return Markdown rows, best accuracy first: mean ± standard deviation over the seeds."""
    lines = ["| attention | accuracy, % | loss, nats | bits/token | s/step | training, s |", "|---" * 6 + "|"]
    for name, rows in sorted(results.items(), key=lambda item: -statistics.mean(row["accuracy"] for row in item[1])):
        units = (("accuracy", 100), ("loss", 1), ("loss", 1 / math.log(2)))
        accuracy, loss, bits = ([row[key] * unit for row in rows] for key, unit in units)
        step, seconds = min(row["step_seconds"] for row in rows), statistics.mean(row["seconds"] for row in rows)
        cells = (name, spread(accuracy, 2), spread(loss, 4), spread(bits), f"{step:.2f}", f"{seconds:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def spread(values: Sequence[float], digits: int = 3) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def plot(output: Path, runs: Sequence[ArmRun]) -> None:
    """Draw the held-out bits/token of every arm, if any: the mean over its seeds and these faintly."""
    from megasparse.evaluation.outputs import COLOURS, new_figure, save_figure

    curves: dict[str, list[tuple[dict[int, float], float]]] = {}
    for run in runs:
        steps = list(read_lines(run.folder / METRICS))
        if curve := {int(step["step"]): step[HELD_OUT] for step in steps if HELD_OUT in step}:
            curves.setdefault(run.arm, []).append((curve, _quiet_step(steps)))
    if not curves:
        return
    figure, (by_step, by_second) = new_figure(2)
    for colour, (arm, seeds) in zip(cycle(COLOURS), curves.items(), strict=False):
        held_out, seconds = [curve for curve, _ in seeds], min(seconds for _, seconds in seeds)
        for curve in held_out if len(seeds) > 1 else ():
            by_step.plot([*curve], [*curve.values()], color=colour, linewidth=0.6, alpha=0.5)
        common = sorted(set.intersection(*map(set, held_out)))
        values = [statistics.mean(curve[step] for curve in held_out) for step in common]
        by_step.plot(common, values, color=colour, label=arm)
        by_second.plot([step * seconds for step in common], values, color=colour)
    by_step.set(title="bits/token of the validation split, over steps", xlabel="steps")
    by_second.set(title="over seconds of training", xlabel="seconds")
    save_figure(figure, output / "curves.svg")
