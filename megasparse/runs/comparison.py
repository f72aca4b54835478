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
OPTIONAL = {"wheels"}


def train_all(
    comparison: dict[str, Any],
    output: Path,
    arms: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    overrides: Sequence[str] = (),
    jobs: int = 1,
) -> dict[str, list[dict[str, float]]]:
    """Train and evaluate what is not done yet, into `output`. Returns by arm, or by "arm; evaluation" where there are
    several, what `train_and_evaluate` returns of each seed.

    comparison: as `load` returns it. arms: only these, in place of all. overrides: `section.key=value` for all runs.
    jobs: runs at a time, each on one CPU thread. Raises UserError where a command fails.
    """
    chosen_arms = {name: comparison["arms"][name] for name in chosen(arms, comparison["arms"])}
    for wheel in comparison.get("wheels", []):
        fetch_wheel(**wheel)
    call("prepare-data", *comparison["prepare"], log=output / "prepare.log")
    runs = [(name, seed) for seed in seeds for name in chosen_arms]
    progress = tqdm(total=len(runs), unit="run", disable=None)

    def run(name: str, seed: int) -> dict[str, dict[str, float]]:
        result = train_and_evaluate(comparison, _folder(output, name, seed), seed, [*chosen_arms[name], *overrides])
        progress.update()
        return result

    with ThreadPoolExecutor(jobs) as pool:
        futures = {(name, seed): pool.submit(run, name, seed) for name, seed in runs}
        found = {key: future.result() for key, future in futures.items()}
    progress.close()
    return {
        f"{name}; {evaluation}" if evaluation else name: [found[name, seed][evaluation] for seed in seeds]
        for name in chosen_arms
        for evaluation in evaluations(comparison)
    }


def commands(
    comparison: dict[str, Any],
    output: Path,
    arms: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    overrides: Sequence[str] = (),
) -> list[list[str]]:
    """The subcommands that `train_all` would run, in order. ConfigError for an arm with a wrong configuration."""
    words: list[list[str]] = [["prepare-data", *comparison["prepare"]]]
    for seed in seeds:
        for name in chosen(arms, comparison["arms"]):
            folder = _folder(output, name, seed)
            training = _training(comparison, folder, seed, [*comparison["arms"][name], *overrides])
            load_config(comparison["config"], training[4::2])
            words += [training, *(_evaluation(comparison, folder, each) for each in evaluations(comparison))]
    return words


def evaluations(comparison: dict[str, Any]) -> dict[str, list[str]]:
    """Arguments of `megasparse evaluate` by the evaluation's name. A list alone is one evaluation without a name."""
    given = comparison["evaluate"]
    return given if isinstance(given, dict) else {"": given}


def _folder(output: Path, arm: str, seed: int) -> Path:
    return output / f"{arm.replace(' ', '_')}-{seed}"


def _training(comparison: dict[str, Any], folder: Path, seed: int, changes: Sequence[str]) -> list[str]:
    settings = [f"run.directory={folder}", f"run.seed={seed}", "run.engine=torch", *changes]
    overrides = [word for setting in settings for word in ("--set", setting)]
    return ["pretrain", "--config", comparison["config"], *overrides]


def _evaluation(comparison: dict[str, Any], folder: Path, name: str) -> list[str]:
    arguments = evaluations(comparison)[name]
    return ["evaluate", "--checkpoint", str(folder), *arguments, "--json", str(_result(folder, name))]


def _result(folder: Path, evaluation: str) -> Path:
    return folder / (f"evaluation-{evaluation.replace(' ', '_')}.json" if evaluation else "evaluation.json")


def load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(str(path), "no such file", "Name a file of configs/comparisons/")
    comparison = parse_json(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(comparison, dict) or "arms" not in comparison:
        raise ConfigError(str(path), "is no comparison", f"Give it exactly the keys {', '.join(sorted(KEYS))}")
    for name, part in by_corpus(comparison).items():
        if part.keys() - OPTIONAL != KEYS:
            keys = f"the keys {', '.join(sorted(KEYS))}, or `corpora` in place of `prepare`"
            raise ConfigError(f"{path}: {name}" if name else str(path), "is no comparison", f"Give it exactly {keys}")
    return comparison


def by_corpus(comparison: dict[str, Any], names: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """The comparison of each corpus, "" -> the comparison itself where it has one alone. names: only these.

    A corpus gives `prepare` and `wheels`, and settings (`set`) that are added to those of every arm.
    """
    corpora = comparison.get("corpora", {"": {}})
    found = {}
    for name in chosen(names, corpora, option="--corpora"):
        corpus = dict(corpora[name])
        settings = corpus.pop("set", [])
        arms = {arm: [*changes, *settings] for arm, changes in comparison["arms"].items()}
        found[name] = {key: value for key, value in comparison.items() if key != "corpora"} | corpus | {"arms": arms}
    return found


def chosen(names: Sequence[str] | None, known: dict[str, Any], option: str = "--arms") -> list[str]:
    """The names, or all that are known where none are given. Raises ConfigError for an unknown one."""
    for name in names or []:
        if name not in known:
            choice = f"Choose among {', '.join(known)}" if any(known) else "Leave it out: there is one corpus"
            raise ConfigError(option, f'there is no "{name}"', choice)
    return list(names or known)


def train_and_evaluate(
    comparison: dict[str, Any], folder: Path, seed: int, changes: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Accuracy and loss of each evaluation, and the seconds that training took."""
    results = {name: _result(folder, name) for name in evaluations(comparison)}
    if not all(result.exists() for result in results.values()):
        call(*_training(comparison, folder, seed, changes), log=folder / "training.log")
    for name, result in results.items():
        if not result.exists():
            call(*_evaluation(comparison, folder, name), log=result.with_suffix(".log"))
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(step["speed/step_seconds"] for step in steps)
    found = {name: json.loads(result.read_text()) for name, result in results.items()}
    return {
        name: {"accuracy": each["accuracy"], "loss": each["nats"] / each["dims"], "seconds": seconds}
        for name, each in found.items()
    }


def call(*words: object, log: Path) -> None:
    """Run a subcommand of megasparse on one thread, its output going to `log`. UserError where it fails."""
    command = [sys.executable, "-m", "megasparse", *map(str, words)]
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}  # its last line is its error
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise UserError(f"megasparse {words[0]} ended with exit code {code}: {' '.join(last)} (all of it in {log})")


def table(results: dict[str, list[dict[str, float]]]) -> list[str]:
    """Markdown rows, best accuracy first: mean ± standard deviation over the seeds."""
    lines = ["| attention | accuracy, % | loss, nats | training, s |", "|---|---|---|---|"]
    for name, runs in sorted(results.items(), key=lambda item: -statistics.mean(r["accuracy"] for r in item[1])):
        accuracy, loss = ([run[key] for run in runs] for key in ("accuracy", "loss"))
        seconds = statistics.mean(run["seconds"] for run in runs)
        shown = [spread([100 * a for a in accuracy], 2), spread(loss, 4), f"{seconds:.0f}"]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return lines


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± standard deviation."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"
