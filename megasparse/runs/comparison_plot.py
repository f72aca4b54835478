"""A comparison's report: held-out bits/dim of its arms against steps and against seconds of training, and a table."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasparse.errors import ConfigError, DataError
from megasparse.evaluation.figure import COLOURS, new_figure, save_figure
from megasparse.runs.comparison import spread

HELD_OUT = "evaluation/bits_per_dim"


def plot(output: Path, arms: Sequence[str], path: Path) -> list[str]:
    """Draw the mean over the seeds of every arm that has run in `output`, and its seeds faintly, into an SVG; the
    numbers go into a JSON file beside it. Returns their table.

    Raises DataError where none has evaluated held-out text, ConfigError without matplotlib.
    """
    curves = {arm: found for arm in arms if (found := read_curves(output, arm))}
    if not curves:
        hint = "Run `megasparse compare` first, of a configuration with evaluation.every above 0"
        raise DataError(output, "no arm here has evaluated held-out text", hint)
    path.with_suffix(".json").write_text(json.dumps(curves, indent=1) + "\n")
    figure, (by_step, by_second) = new_figure(2)
    for number, (arm, seeds) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        for run in seeds.values() if len(seeds) > 1 else ():
            by_step.plot(*points(run["held_out"]), color=colour, linewidth=0.6, alpha=0.5)
        steps, values = points(mean([run["held_out"] for run in seeds.values()]))
        seconds = min(run["step_seconds"] for run in seeds.values())
        by_step.plot(steps, values, color=colour, label=arm)
        by_second.plot([step * seconds for step in steps], values, color=colour)
    by_step.set(title="held-out bits/dim over steps", xlabel="steps")
    by_second.set(title="over seconds of training", xlabel="seconds")
    save_figure(figure, path)
    return summary(curves)


def report(output: Path, arms: Sequence[str]) -> list[str]:
    """Write OUTPUT/report.md, the picture and the table of what has run there, all its numbers in curves.json. Returns
    what to print; nothing where no arm evaluates held-out text.
    """
    if not any(read_curves(output, arm) for arm in arms):
        return []
    try:
        lines = plot(output, arms, output / "curves.svg")
    except ConfigError as without_matplotlib:
        return [f"{without_matplotlib}"]
    (output / "report.md").write_text("\n".join(["![held-out bits/dim](curves.svg)", "", *lines]) + "\n")
    return [*lines, f"{output / 'report.md'} has the curves"]


def summary(curves: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Markdown rows of the arms that are evaluated, fewest bits/dim first: mean ± standard deviation over the seeds."""
    rows = []
    for arm, seeds in curves.items():
        tests = [run["test"] for run in seeds.values() if run["test"] is not None]
        if tests:
            steps = max(run["steps"] for run in seeds.values())
            step = min(run["step_seconds"] for run in seeds.values())
            cells = [arm, f"{len(tests)}", f"{steps}", f"{step:.2f}", f"{steps * step:.0f}", spread(tests, 3)]
            rows.append((statistics.mean(tests), f"| {' | '.join(cells)} |"))
    head = "| attention | seeds | steps | a step, s | training, s | bits/dim of the test split |"
    return [head, "|---|---|---|---|---|---|"] + [row for _, row in sorted(rows)]


def read_curves(output: Path, arm: str) -> dict[str, dict[str, Any]]:
    """By seed: `held_out`, bits/dim by step; `test`, those of the evaluation after training, or None; `steps`; and
    `step_seconds`, a quiet step's: the fastest twentieth is below it, so a busy machine moves it little.
    """
    found, stem = {}, f"{arm.replace(' ', '_')}-"
    for folder in sorted(output.glob(f"{stem}*")):
        seed, metrics, result = folder.name[len(stem) :], folder / "metrics.jsonl", folder / "evaluation.json"
        if not seed.isdigit() or not metrics.exists():  # or of an arm with a longer name
            continue
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        held_out = {str(line["step"]): line[HELD_OUT] for line in lines if HELD_OUT in line}
        if not held_out:
            continue
        seconds = sorted(line["speed/step_seconds"] for line in lines)
        found[seed] = {
            "held_out": held_out,
            "test": json.loads(result.read_text())["bits_per_dim"] if result.exists() else None,
            "steps": lines[-1]["step"],
            "step_seconds": seconds[len(seconds) // 20],
        }
    return found


def mean(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean over the runs at the steps that all of them have."""
    common = [step for step in runs[0] if all(step in run for run in runs)]
    return {step: statistics.mean(run[step] for run in runs) for step in common}


def points(curve: dict[str, float]) -> tuple[list[int], list[float]]:
    return [int(step) for step in curve], list(curve.values())
