"""Fine-tuning with every combination of some settings, on several seeds each: see `megasparse sweep --help`."""

import hashlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from megasparse.config.extends import read_values
from megasparse.config.strict_json import parse
from megasparse.errors import ConfigError, UserError
from megasparse.evaluation.outputs import write_json
from megasparse.tasks.metrics import LOWER_IS_BETTER

LAUNCHER = ["-m", "megasparse", "finetune"]
"""What Python runs for one run."""
OWN_KEYS = ("run.seed", "run.directory")
LONGEST_NAME = 100


@dataclass
class Combination:
    settings: dict[str, Any]
    name: str
    """Folder's name, made of the settings that vary."""
    seeds: int
    runs: list[dict[str, Any]] = field(default_factory=list)
    """The content of best.json of each finished run, with its seed."""
    failed: dict[int, str] = field(default_factory=dict)
    """Seed -> why its run has no result."""

    @property
    def values(self) -> list[float]:
        return [run["value"] for run in self.runs]

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.values) if self.runs else None

    @property
    def sign(self) -> int:
        """1 where a higher metric is better, -1 where a lower one is."""
        return -1 if self.runs and self.runs[0]["metric"].removeprefix("evaluation/") in LOWER_IS_BETTER else 1

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over the seeds; None for fewer than two."""
        return statistics.stdev(self.values) if len(self.runs) > 1 else None


@dataclass(frozen=True)
class Sweep:
    """What is tried, and where."""

    config: Path
    """The configuration that all runs share."""
    grid: Path
    """JSON file: {"section.key": [value, ...], ...}."""
    output: Path
    seeds: int = 1
    """Seeds 0 to `seeds` - 1 of every combination."""
    set: list[str] = field(default_factory=list)
    """`section.key=value` for all runs."""


def sweep(given: Sweep, dry_run: bool = False) -> None:
    """Run what is not done yet, write OUTPUT/sweep.json and print the table, best mean first. dry_run: only print the
    commands.

    Raises ConfigError for what is wrong with the grid, and UserError at the end where a run has failed.
    """
    if given.seeds < 1:
        raise ConfigError("--seeds", f"{given.seeds} is too few", "Ask for 1 or more")
    settings = read_values(given.config)
    grid = load_grid(given.grid)
    alike = [f"{key}={json.dumps(values[0])}" for key, values in grid.items() if len(values) == 1]
    content = {"config": settings, "set": given.set + alike}
    combinations = combine(grid, given.set, given.seeds)
    runs = [(combination, seed) for combination in combinations for seed in range(given.seeds)]
    if dry_run:
        for combination, seed in runs:
            print(shlex.join(command(given, combination, seed)))
        return
    begin(given.output, content)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has SIGHUP ignored, and means it
            signal.signal(number, _interrupt)
    for count, (combination, seed) in enumerate(runs, start=1):
        take(given, combination, seed, f"{count}/{len(runs)}")
        write_json(given.output / "sweep.json", content | summary(combinations))
    print("\n".join(table(combinations)))
    if failed := sum(len(each.failed) for each in combinations):
        raise UserError(f"{failed} of {len(runs)} runs failed, see above. Correct them: the same command runs the rest")


def read(file: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(str(file), f"cannot be read ({error})", "Give a JSON file of configs/finetune/") from None
    value = parse(text, str(file))
    if not isinstance(value, dict):
        raise ConfigError(str(file), "is no JSON object", "Give a JSON file of configs/finetune/")
    return value


def load_grid(file: Path) -> dict[str, list[Any]]:
    """Raises ConfigError for what is no list of different values, and for keys that are the sweep's own."""
    grid = read(file)
    for key, values in grid.items():
        if key in OWN_KEYS:
            raise ConfigError(f"{file} {key}", "is set by the sweep itself", "Remove it; --seeds gives the seeds")
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{file} {key}", f"{json.dumps(values)} is no list of values", "Write [value, ...]")
        written = [json.dumps(value) for value in values]
        if len(set(written)) < len(written):
            raise ConfigError(f"{file} {key}", f"{json.dumps(values)} has a value twice", "Remove one of the two")
    return grid


def combine(grid: dict[str, list[Any]], overrides: Sequence[str], seeds: int) -> list[Combination]:
    """Every combination, the last key's values changing first. Raises ConfigError for a key that --set sets too."""
    for override in overrides:
        if (key := override.partition("=")[0].strip()) in (*OWN_KEYS, *grid):
            raise ConfigError(f"--set {key}", "is what the sweep varies", "Remove it here, or in the grid")
    varied = [key for key, values in grid.items() if len(values) > 1]
    made = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [Combination(each, folder_name({key: each[key] for key in varied}), seeds) for each in made]


def folder_name(settings: dict[str, Any]) -> str:
    """A name that only these settings have."""
    whole = ",".join(f"{key.rpartition('.')[2]}={json.dumps(value)}" for key, value in settings.items()) or "all"
    name = re.sub(r"[^A-Za-z0-9_.,=+-]+", "_", whole)[:LONGEST_NAME]
    keys = [key.rpartition(".")[2] for key in settings]
    if name == whole and len(set(keys)) == len(keys):
        return name
    return f"{name}-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]}"


def command(given: Sweep, combination: Combination, seed: int) -> list[str]:
    overrides = [*given.set, *(f"{key}={json.dumps(value)}" for key, value in combination.settings.items())]
    overrides += [
        f"run.seed={seed}",
        f"run.directory={json.dumps(str(given.output / combination.name / f'seed{seed}'))}",
    ]
    words = [sys.executable, *LAUNCHER, "--config", str(given.config)]
    return words + [word for override in overrides for word in ("--set", override)]


def begin(output: Path, content: dict[str, Any]) -> None:
    """Raises ConfigError where the folder has another sweep, whose runs would be taken for this one's."""
    file = output / "sweep.json"
    if file.exists():
        earlier = read(file)
        for key, what in (("config", "another configuration"), ("set", "other --set")):
            if earlier.get(key) != content[key]:
                raise ConfigError("--output", f"{output} holds a sweep with {what}", "Give it a folder of its own")
    else:
        write_json(file, content)


def take(given: Sweep, combination: Combination, seed: int, number: str) -> None:
    """Run one combination with one seed where that is not done, and note its result or its failure."""
    place = given.output / combination.name / f"seed{seed}"
    reported = f"{number} {combination.name} seed {seed}"
    done = (place / "best.json").exists()  # it is written when training has ended
    if not done:
        print(f"{reported}: running, see {log_file(place)}", file=sys.stderr, flush=True)
    reason = None if done else run(command(given, combination, seed), place)
    best = result(place) if reason is None else {}
    if not best:
        combination.failed[seed] = reason or f"{place / 'best.json'} has no result. Delete {place} to run it anew"
        print(f"{reported}: failed: {combination.failed[seed]}", file=sys.stderr, flush=True)
        return
    combination.runs.append({"seed": seed, "directory": str(place), **best})
    before = " (done before)" if done else ""
    print(f"{reported}: {best['metric']} {best['value']:.4f}{before}", file=sys.stderr, flush=True)


def result(place: Path) -> dict[str, Any]:
    """The content of best.json; empty where there is none, or no number in it."""
    try:
        best = json.loads((place / "best.json").read_text(encoding="utf-8"))
        return best if math.isfinite(best["value"]) and best["metric"] else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def log_file(place: Path) -> Path:
    return place.with_suffix(".log")


def run(words: list[str], place: Path) -> str | None:
    """Run a command to its end, its output being added to the log. Returns why it has no result, None where it has.

    An interrupt is passed on, and waited for: the run saves, and goes on from there another time.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with log_file(place).open("ab") as log:
        start = log.tell()
        # A session of its own: the terminal's Ctrl-C must reach the run once, as SIGTERM, and not twice.
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # its last line is its error, not what stdout held back
        )
        try:
            code = child.wait()
        except KeyboardInterrupt:
            print("interrupted: waiting for the run to save", file=sys.stderr, flush=True)
            child.terminate()
            child.wait()
            raise
    if code == 0:
        return None if (place / "best.json").exists() else "it was stopped before its end"
    printed = log_file(place).read_bytes()[start:].decode(errors="replace")
    last = [line.strip() for line in printed.splitlines() if line.strip()][-1:]
    return f"exit code {code}: {' '.join(last)}"


def summary(combinations: Sequence[Combination]) -> dict[str, Any]:
    """The results as sweep.json holds them."""
    best = best_of(combinations)
    names = ("settings", "name", "mean", "deviation", "runs", "failed")
    reported = [{name: getattr(each, name) for name in names} for each in ranked(combinations)]
    return {"combinations": reported, "best": None if best is None else best.settings}


def ranked(combinations: Sequence[Combination]) -> list[Combination]:
    """Best mean first, those without one last."""
    return sorted(combinations, key=lambda each: math.inf if each.mean is None else -each.mean * each.sign)


def best_of(combinations: Sequence[Combination]) -> Combination | None:
    """The best mean among those that have a result for every seed: fewer seeds make for luckier means."""
    return next((each for each in ranked(combinations) if len(each.runs) == each.seeds), None)


def table(combinations: Sequence[Combination]) -> list[str]:
    """Markdown rows, best mean first."""
    metrics = sorted({run["metric"] for each in combinations for run in each.runs}) or ["metric"]
    best = best_of(combinations)
    lines = [f"| combination | {' '.join(metrics)}, mean | standard deviation | seeds | |", "|---|---|---|---|---|"]
    for each in ranked(combinations):
        shown = ["" if value is None else f"{value:.4f}" for value in (each.mean, each.deviation)]
        note = "best" if each is best else f"{len(each.failed)} failed" if each.failed else ""
        lines.append(f"| {each.name} | {' | '.join(shown)} | {len(each.runs)} | {note} |")
    return lines


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
