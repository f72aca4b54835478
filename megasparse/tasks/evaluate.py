"""Fine-tuned models on labelled examples: the official metrics, and how sure they are."""

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megasparse import __version__
from megasparse.errors import ConfigError
from megasparse.tasks.encoding import Encoded
from megasparse.tasks.form import Form, column
from megasparse.tasks.intervals import RESAMPLES, bootstrap_interval, t_interval
from megasparse.tasks.metrics import METRICS, require_metrics
from megasparse.tasks.predictions import Row, predicted, predictions, read
from megasparse.tasks.restore import Finetuned, chosen_checkpoint, restore_task
from megasparse.tasks.run import labelled, read_files
from megasparse.tasks.scoring import Prediction, answers
from megasparse.tasks.sources import chosen_files, sha256_of
from megasparse.tasks.text_metrics import signature

LIBRARIES = ("torch", "numpy", "scipy", "scikit-learn", "sacrebleu", "rouge-score", "tokenizers")


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """A checkpoint, and its predictions on the examples."""

    form: Form
    examples: Sequence[Encoded]
    tables: list[list[Prediction]]
    """The predictions by each seed of the draws."""
    entry: dict[str, Any]
    """The checkpoint's entry in `runs` of the result."""

    def interval(self, name: str) -> tuple[float, float] | None:
        """The 95 % confidence interval of a metric over examples."""
        labels = column([self.form.label(example) for example in self.examples])
        own = [column(answers(self.form, self.examples, table)) for table in self.tables]
        with tqdm(total=RESAMPLES, desc=f"resampling {name}", leave=False, disable=None) as bar:
            return bootstrap_interval(METRICS[name], labels, own, self.entry["seed"], bar.update)

    def predictions(self) -> list[Row]:
        """The rows of a prediction file, by the first seed."""
        return predictions(self.form, self.examples, self.tables[0])


def evaluate_checkpoints(
    directories: Sequence[str],
    overrides: Sequence[str],
    name: str,
    sources: Sequence[str],
    split: str | None = None,
    draws: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, Any], list[EvaluatedCheckpoint]]:
    """Score checkpoints of a task on files that have labels.

    directories: runs, each by its best checkpoint, or checkpoints. draws: passes over the examples, each with draws of
    randomised attention of its own, of the seeds run.seed, run.seed + 1, ...; a checkpoint's metric is its mean over
    them. say: prints the counts of the examples.

    Returns the evaluated checkpoints, and as the result {"task", "split", "files", "examples", "metrics", "signatures",
    "interval", "runs", "versions"}. Each metric has `value`, `low` and `high`: of one checkpoint with the bootstrap
    interval over examples, of several the mean with Student's t interval, and their `standard_deviation`. `signatures`
    are those that a metric's library gives: its settings and version. Raises as `restore_task` and the task's reader
    do; ConfigError where the same checkpoint is given twice.
    """
    require_metrics()
    paths = [chosen_checkpoint(Path(directory)).resolve() for directory in directories]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            hint = "Give each once: they count as independent runs"
            raise ConfigError("--checkpoint", f"{path} is given twice", hint)
    evaluated: list[EvaluatedCheckpoint] = []
    for directory in directories:
        found = restore_task(directory, overrides, name)
        chosen, files = chosen_files(found.task, sources, split)
        if evaluated and evaluated[0].form.task.classes != found.task.classes:
            raise ConfigError("--checkpoint", f"{directory} was trained on other classes", "Evaluate it on its own")
        evaluated.append(_evaluate(found, chosen or "given", files, draws, say))
    first = evaluated[0]
    result = {
        "task": first.form.task.name,
        "split": chosen,
        "files": [{"file": str(file), "sha256": sha256_of(file)} for file in files],
        "examples": len(first.examples),
        "metrics": {name: _metric(name, evaluated) for name in first.form.task.metrics},
        "signatures": {name: text for name in first.form.task.metrics if (text := signature(name)) is not None},
        "interval": _interval_name(evaluated),
        "runs": [each.entry for each in evaluated],
        "versions": {
            "python": platform.python_version(), "megasparse": __version__,
            **{library: version(library) for library in LIBRARIES},
        },
    }  # fmt: skip
    return result, evaluated


def summary(result: dict[str, Any]) -> str:
    """The summary that megasparse evaluate prints."""
    where, runs = result["split"] or ", ".join(each["file"] for each in result["files"]), result["runs"]
    lines = [f"{result['task']}, {where}: {result['examples']:,} examples; {_runs_named(runs)}"]
    for name, found in result["metrics"].items():
        line = f"{name} {found['value']:.4f}"
        if found["low"] is not None:
            line += f" ({result['interval']}: {found['low']:.4f} to {found['high']:.4f})"
        if found["standard_deviation"] is not None:
            each = ", ".join(f"{run['metrics'][name]:.4f}" for run in runs)
            line += f"; standard deviation {found['standard_deviation']:.4f}; each: {each}"
        deviations = [run["deviation_over_draws"][name] for run in runs if run["deviation_over_draws"]]
        if deviations:
            line += f"; standard deviation over {len(runs[0]['draw_seeds'])} draws "
            line += ", ".join(f"{deviation:.4f}" for deviation in deviations)
        lines.append(line)
    return "\n".join(lines)


def _runs_named(runs: list[dict[str, Any]]) -> str:
    if len(runs) == 1:
        return f"step {runs[0]['step']} of {runs[0]['checkpoint']}"
    return f"{len(runs)} runs, seeds {', '.join(str(run['seed']) for run in runs)}"


def _evaluate(
    found: Finetuned, split: str, files: list[Path], draws: int, say: Callable[[str], None]
) -> EvaluatedCheckpoint:
    examples = labelled(read_files(found.task, files), split, files[0])
    encoded = read(found, examples, split, say)
    seeds = [found.config.run.seed + number for number in range(draws)]
    tables = [predicted(found, encoded, seed) for seed in seeds]
    counts = found.encoder.counts
    measured = [found.form.measures(encoded, answers(found.form, encoded, table)) for table in tables]
    values = {name: [each[name] for each in measured] for name in found.task.metrics}
    entry = {
        "checkpoint": str(found.checkpoint.path),
        "step": found.checkpoint.step,
        "seed": found.config.run.seed,
        "metrics": {name: statistics.fmean(each) for name, each in values.items()},
        "draw_seeds": seeds,
        "draws": values,
        "deviation_over_draws": {name: statistics.stdev(each) for name, each in values.items()} if draws > 1 else None,
        "attention": found.model.body.attention(),
        "precision": found.config.training.precision,
        "max_length": found.config.task.max_length,
        "inputs": {"cut": counts.cut, "empty": counts.empty, "longest": counts.longest},
    }
    return EvaluatedCheckpoint(found.form, encoded, tables, entry)


def _metric(name: str, evaluated: list[EvaluatedCheckpoint]) -> dict[str, float | None]:
    values = [each.entry["metrics"][name] for each in evaluated]
    interval = evaluated[0].interval(name) if len(evaluated) == 1 else t_interval(values)
    low, high = interval or (None, None)
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"value": statistics.fmean(values), "low": low, "high": high, "standard_deviation": deviation}


def _interval_name(evaluated: list[EvaluatedCheckpoint]) -> str:
    if len(evaluated) == 1:
        return f"95 %, bootstrap over examples, {RESAMPLES:,} resamples"
    return f"95 %, Student's t over {len(evaluated)} runs"
