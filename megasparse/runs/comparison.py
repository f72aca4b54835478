"""One task, many attention mechanisms: each is trained and evaluated alike, by ordinary commands."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megasparse.config.files import parse_json
from megasparse.config.load import load_config
from megasparse.data.corpora.download import fetch_wheel
from megasparse.errors import ConfigError, UserError

KEYS = {"prepare", "config", "evaluate", "arms"}
HELD_OUT = "evaluation/bits_per_dim"
Runs = dict[str, list[dict[str, float]]]
"""Results by arm, or by "arm; evaluation" where there are several evaluations; a seed each."""


def load(path: Path) -> dict[str, Any]:
    """Read a comparison. Raises ConfigError for a file that is none."""
    if not path.is_file():
        raise ConfigError(str(path), "no such file", "Name a file of configs/comparisons/")
    comparison = parse_json(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(comparison, dict) or "arms" not in comparison:
        raise ConfigError(str(path), "is no comparison", f"Give it exactly the keys {', '.join(sorted(KEYS))}")
    for name, part in by_corpus(comparison).items():
        if part.keys() - {"wheels"} != KEYS:
            keys = f"the keys {', '.join(sorted(KEYS))}, or `corpora` in place of `prepare`"
            raise ConfigError(f"{path}: {name}" if name else str(path), "is no comparison", f"Give it exactly {keys}")
    return comparison


def by_corpus(comparison: dict[str, Any], names: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return the comparison of each corpus, or of `names`; "" -> the comparison itself if it has only one.

    A corpus gives `prepare` and `wheels`, and settings (`set`) that are added to those of every arm.
    """
    corpora, parts = comparison.get("corpora", {"": {}}), {}
    for name in chosen(names, corpora, option="--corpora"):
        corpus = dict(corpora[name])
        settings = corpus.pop("set", [])
        arms = {arm: [*changes, *settings] for arm, changes in comparison["arms"].items()}
        parts[name] = {key: value for key, value in comparison.items() if key != "corpora"} | corpus | {"arms": arms}
    return parts


def chosen(names: Sequence[str] | None, choices: dict[str, Any], option: str = "--arms") -> list[str]:
    """Return the names, or all choices if none are given. Raises ConfigError for an unknown one."""
    for name in names or []:
        if name not in choices:
            hint = f"Choose among {', '.join(choices)}" if any(choices) else "Leave it out: there is one corpus"
            raise ConfigError(option, f'there is no "{name}"', hint)
    return list(names or choices)


def evaluations(comparison: dict[str, Any]) -> dict[str, list[str]]:
    """Return the arguments of `megasparse evaluate` by the evaluation's name, "" if there is one without a name."""
    words = comparison["evaluate"]
    return words if isinstance(words, dict) else {"": words}


def train_all(
    comparison: dict[str, Any],
    output: Path,
    arms: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    overrides: Sequence[str] = (),
    jobs: int = 1,
) -> Runs:
    """Train and evaluate what is not done yet, into `output`.

    Args:
        comparison: as `load` returns it, of one corpus.
        arms: only these, in place of all.
        overrides: `section.key=value` for all runs.
        jobs: runs at a time, each on one CPU thread.

    Raises:
        UserError: if a command fails.
    """
    arms = chosen(arms, comparison["arms"])
    for wheel in comparison.get("wheels", []):
        fetch_wheel(**wheel)
    call("prepare-data", *comparison["prepare"], log=output / "prepare.log")
    runs = [(name, seed) for seed in seeds for name in arms]
    progress = tqdm(total=len(runs), unit="run", disable=None)

    def run(name: str, seed: int) -> dict[str, dict[str, float]]:
        result = _train_and_evaluate(comparison, output, name, seed, overrides)
        progress.update()
        return result

    with ThreadPoolExecutor(jobs) as pool:
        futures = {key: pool.submit(run, *key) for key in runs}
        results = {key: future.result() for key, future in futures.items()}
    progress.close()
    return {
        f"{name}; {evaluation}" if evaluation else name: [results[name, seed][evaluation] for seed in seeds]
        for name in arms
        for evaluation in evaluations(comparison)
    }


def commands(
    comparison: dict[str, Any],
    output: Path,
    arms: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    overrides: Sequence[str] = (),
) -> list[list[str]]:
    """Return the subcommands that `train_all` runs. Raises ConfigError for an arm with a wrong configuration."""
    words: list[list[str]] = [["prepare-data", *comparison["prepare"]]]
    for seed in seeds:
        for name in chosen(arms, comparison["arms"]):
            training, *evaluated = _commands(comparison, output, name, seed, overrides)
            load_config(comparison["config"], training[4::2])
            words += [training, *evaluated]
    return words


def _commands(
    comparison: dict[str, Any], output: Path, arm: str, seed: int, overrides: Sequence[str]
) -> list[list[str]]:
    """Return the training of an arm, then its evaluations, each of which ends in its result file."""
    folder = _folder(output, arm, seed)
    settings = [f"run.directory={folder}", f"run.seed={seed}", "run.engine=torch", *comparison["arms"][arm], *overrides]
    training = ["pretrain", "--config", comparison["config"]]
    training += [word for setting in settings for word in ("--set", setting)]
    words = [training]
    for name, arguments in evaluations(comparison).items():
        result = folder / (f"evaluation-{name.replace(' ', '_')}.json" if name else "evaluation.json")
        words.append(["evaluate", "--checkpoint", str(folder), *arguments, "--json", str(result)])
    return words


def _folder(output: Path, arm: str, seed: int | str) -> Path:
    return output / f"{arm.replace(' ', '_')}-{seed}"


def _train_and_evaluate(
    comparison: dict[str, Any], output: Path, arm: str, seed: int, overrides: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return accuracy and loss of each evaluation, and the seconds that training took."""
    training, *evaluated = _commands(comparison, output, arm, seed, overrides)
    folder, files = _folder(output, arm, seed), [Path(words[-1]) for words in evaluated]
    if not all(file.exists() for file in files):
        call(*training, log=folder / "training.log")
    for words, file in zip(evaluated, files, strict=True):
        if not file.exists():
            call(*words, log=file.with_suffix(".log"))
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(step["speed/step_seconds"] for step in steps)
    results = {name: json.loads(file.read_text()) for name, file in zip(evaluations(comparison), files, strict=True)}
    return {
        name: {"accuracy": result["accuracy"], "loss": result["nats"] / result["dims"], "seconds": seconds}
        for name, result in results.items()
    }


def call(*words: object, log: Path) -> None:
    """Run a subcommand of megasparse on one thread, with its output in `log`. Raises UserError if it fails."""
    command = [sys.executable, "-m", "megasparse", *map(str, words)]
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}  # its last line is its error
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise UserError(f"megasparse {words[0]} ended with exit code {code}: {' '.join(last)} (all of it in {log})")


def table(results: Runs) -> list[str]:
    """Return Markdown rows, best accuracy first: mean ± standard deviation over the seeds."""
    lines = ["| attention | accuracy, % | loss, nats | training, s |", "|---|---|---|---|"]
    for name, runs in sorted(results.items(), key=lambda item: -statistics.mean(r["accuracy"] for r in item[1])):
        accuracy, loss = ([run[key] for run in runs] for key in ("accuracy", "loss"))
        seconds = statistics.mean(run["seconds"] for run in runs)
        lines.append(f"| {name} | {spread([100 * a for a in accuracy], 2)} | {spread(loss, 4)} | {seconds:.0f} |")
    return lines


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return mean ± standard deviation."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def read_curves(output: Path, arm: str) -> dict[str, dict[str, Any]]:
    """Return by seed: `held_out`, bits/dim by step; `result`, those of the evaluation after training, or None; `steps`;
    and `step_seconds` of a quiet step: a twentieth of the steps is faster, so a busy machine moves it little.
    """
    curves, stem = {}, _folder(output, arm, "").name
    for folder in sorted(output.glob(f"{stem}*")):
        seed, metrics, result = folder.name[len(stem) :], folder / "metrics.jsonl", folder / "evaluation.json"
        if not seed.isdigit() or not metrics.exists():  # or of an arm with a longer name
            continue
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        held_out = {str(line["step"]): line[HELD_OUT] for line in lines if HELD_OUT in line}
        if held_out:
            seconds = sorted(line["speed/step_seconds"] for line in lines)
            curves[seed] = {
                "held_out": held_out,
                "result": json.loads(result.read_text())["bits_per_dim"] if result.exists() else None,
                "steps": lines[-1]["step"],
                "step_seconds": seconds[len(seconds) // 20],
            }
    return curves


def plot(output: Path, arms: Sequence[str]) -> list[str]:
    """Draw the mean over the seeds of every arm that has run in `output`, and its seeds faintly, into curves.svg; the
    numbers go into curves.json. Returns their table, fewest bits/dim first; nothing if no arm evaluates held-out text.
    """
    from megasparse.evaluation.figure import COLOURS, new_figure, save_figure

    curves = {arm: seeds for arm in arms if (seeds := read_curves(output, arm))}
    if not curves:
        return []
    (output / "curves.json").write_text(json.dumps(curves, indent=1) + "\n")
    figure, (by_step, by_second) = new_figure(2)
    rows = []
    for number, (arm, seeds) in enumerate(curves.items()):
        colour, held_out = COLOURS[number % len(COLOURS)], [run["held_out"] for run in seeds.values()]
        for curve in held_out if len(seeds) > 1 else ():
            by_step.plot([*map(int, curve)], [*curve.values()], color=colour, linewidth=0.6, alpha=0.5)
        common = [step for step in held_out[0] if all(step in curve for curve in held_out)]
        values = [statistics.mean(curve[step] for curve in held_out) for step in common]
        seconds = min(run["step_seconds"] for run in seeds.values())
        by_step.plot([*map(int, common)], values, color=colour, label=arm)
        by_second.plot([int(step) * seconds for step in common], values, color=colour)
        results = [run["result"] for run in seeds.values() if run["result"] is not None]
        if results:
            steps = max(run["steps"] for run in seeds.values())
            cells = [arm, f"{len(results)}", f"{steps}", f"{seconds:.2f}", f"{steps * seconds:.0f}", spread(results)]
            rows.append((statistics.mean(results), f"| {' | '.join(cells)} |"))
    by_step.set(title="held-out bits/dim over steps", xlabel="steps")
    by_second.set(title="over seconds of training", xlabel="seconds")
    save_figure(figure, output / "curves.svg")
    head = "| attention | seeds | steps | a step, s | training, s | bits/dim of the evaluation |"
    return [head, "|---|---|---|---|---|---|", *(row for _, row in sorted(rows)), "", f"{output}/curves.svg"]
