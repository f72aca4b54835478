r"""One task, many attention mechanisms: train each alike, evaluate each alike, print the table.

    python tools/compare_attention.py configs/comparisons/duplication.json
    python tools/compare_attention.py configs/comparisons/masked_text.json --seeds 0 1 2 --jobs 2
    python tools/compare_attention.py configs/comparisons/duplication.json --arms full lha        (a CPU, two minutes)
    python tools/compare_attention.py configs/comparisons/duplication.json --arms lha --set training.steps=3000 \
      --output runs/longer

A comparison is a JSON file: `prepare`, the arguments of tools/prepare_data.py that make the data; `config`, the run's
configuration; `evaluate`, further arguments of launch/evaluate.py; and `arms`, name -> what differs, as
`section.key=value` each. Arms differ in nothing else: the data come in the same order, and weights that arms share
start alike. Every step is an ordinary command. What is done already is not done again, so an interrupted comparison
goes on.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megasparse.config.command_line import add_overrides
from megasparse.config.strict_json import parse
from megasparse.errors import ConfigError, UserError, report_user_errors

KEYS = {"prepare", "config", "evaluate", "arms"}


@report_user_errors
def main() -> None:
    args = arguments()
    comparison = load(args.comparison)
    arms = {name: comparison["arms"][name] for name in chosen(args.arms, comparison["arms"])}
    if args.set and args.output is None:
        raise ConfigError("--set", "makes other runs than the comparison's own", "Give them a folder with --output")
    output = args.output or Path("runs") / args.comparison.stem
    call("tools/prepare_data.py", *comparison["prepare"], log=output / "prepare.log")
    runs = [(name, seed) for seed in args.seeds for name in arms]
    progress = tqdm(total=len(runs), unit="run")

    def run(name: str, seed: int) -> dict[str, float]:
        folder = output / f"{name.replace(' ', '_')}-{seed}"
        result = train_and_evaluate(comparison, folder, seed, [*arms[name], *args.set])
        progress.update()
        return result

    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {(name, seed): pool.submit(run, name, seed) for name, seed in runs}
        found = {key: future.result() for key, future in futures.items()}
    progress.close()
    lines = table({name: [found[name, seed] for seed in args.seeds] for name in arms})
    (output / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="compare_attention.py", description=__doc__, formatter_class=raw)
    parser.add_argument("comparison", type=Path, metavar="COMPARISON", help="a file of configs/comparisons/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a run of every arm for each (default: 0)")
    parser.add_argument("--arms", nargs="+", help="only these; all where left out")
    add_overrides(parser)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one CPU thread (default: 1)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the runs (default: runs/COMPARISON)")
    return parser.parse_args()


def load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(str(path), "no such file", "Name a file of configs/comparisons/")
    comparison = parse(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(comparison, dict) or comparison.keys() != KEYS:
        raise ConfigError(str(path), "is no comparison", f"Give it exactly the keys {', '.join(sorted(KEYS))}")
    return comparison


def chosen(names: list[str] | None, arms: dict[str, Any]) -> list[str]:
    for name in names or []:
        if name not in arms:
            raise ConfigError("--arms", f'there is no arm "{name}"', f"Choose among {', '.join(arms)}")
    return names or list(arms)


def train_and_evaluate(comparison: dict[str, Any], folder: Path, seed: int, changes: list[str]) -> dict[str, float]:
    """The numbers of launch/evaluate.py, and the seconds that training took."""
    settings = [f"run.directory={folder}", f"run.seed={seed}", "run.engine=torch", *changes]
    overrides = [word for setting in settings for word in ("--set", setting)]
    result = folder / "evaluation.json"
    if not result.exists():
        call("launch/pretrain.py", "--config", comparison["config"], *overrides, log=folder / "training.log")
        arguments = ["--checkpoint", folder, *comparison["evaluate"], "--json", result]
        call("launch/evaluate.py", *arguments, log=folder / "evaluation.log")
    found = json.loads(result.read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(step["speed/step_seconds"] for step in steps)
    return {"accuracy": found["accuracy"], "loss": found["nats"] / found["dims"], "seconds": seconds}


def call(*words: object, log: Path) -> None:
    """Run one of the project's commands on one thread, its output going to `log`. UserError where it fails."""
    command = [sys.executable, *map(str, words)]
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise UserError(f"{' '.join(command[1:3])} ended with exit code {code}: {' '.join(last)} (all of it in {log})")


def table(results: dict[str, list[dict[str, float]]]) -> list[str]:
    """Markdown rows, best accuracy first: mean ± standard deviation over the seeds."""
    lines = ["| attention | accuracy, % | loss, nats | training, s |", "|---|---|---|---|"]
    for name, runs in sorted(results.items(), key=lambda item: -statistics.mean(r["accuracy"] for r in item[1])):
        accuracy, loss = ([run[key] for run in runs] for key in ("accuracy", "loss"))
        seconds = statistics.mean(run["seconds"] for run in runs)
        shown = [spread([100 * a for a in accuracy], 2), spread(loss, 4), f"{seconds:.0f}"]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return lines


def spread(values: list[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


if __name__ == "__main__":
    main()
