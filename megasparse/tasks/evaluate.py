"""Fine-tuned models on examples: predictions, official metrics with their intervals, and files. N examples."""

import csv
import io
import json
import math
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from megasparse import __version__
from megasparse.config.finetuning import FinetuneConfig
from megasparse.errors import ConfigError, DataError, UserError
from megasparse.evaluation.outputs import whole_file
from megasparse.ops.random import EVALUATION_STEP, RngContext
from megasparse.tasks.batches import Encoded
from megasparse.tasks.form import Form, column
from megasparse.tasks.metrics import (
    LOWER_IS_BETTER,
    METRICS,
    RESAMPLES,
    bootstrap_interval,
    require_metrics,
    signature,
    t_interval,
)
from megasparse.tasks.run import Finetuned, TaskRun, chosen_checkpoint, encode_all, labelled, read_files, restore_task
from megasparse.tasks.task import Example, SourceLocation, chosen_files, sha256_of
from megasparse.training.engines.contract import Engine
from megasparse.training.loop_state import Selection
from megasparse.training.ranks import Ranks, RunHooks, check_stop
from megasparse.training.run import Evaluate

Score = Callable[[Any, RngContext], tuple[Any, dict[str, Any]]]
"""A model of a task's form in evaluation, or an engine around one: (batch, rng) -> (objective, statistics)."""


class Prediction(NamedTuple):
    """The model's output for one example."""

    values: np.ndarray
    """Flat float64: what the form's `answer` reads."""
    cost: float
    weight: float
    """The loss is the sum of costs divided by that of weights; both are NaN where the example has no label."""


def predict_examples(
    score: Score,
    form: Form,
    examples: Sequence[Encoded],
    config: FinetuneConfig,
    ranks: Ranks,
    pause: Callable[[], object] = lambda: None,
) -> list[Prediction]:
    """The model's prediction for each example, on every rank.

    The ranks share the batches out among them; every one scores equally many. A prediction depends neither on
    the batch nor on the rank that its example is in. pause: called before each batch.
    """
    order = sorted(range(len(examples)), key=lambda i: -examples[i].length)
    size = config.evaluation.batch
    batches = [order[first : first + size] for first in range(0, len(order), size)]
    batches += batches[:1] * (-len(batches) % ranks.world_size)
    found: list[list[Any]] = []
    for numbers in batches[ranks.rank :: ranks.world_size]:
        pause()
        batch = form.collate([examples[i] for i in numbers]).to(ranks.device)
        rng = RngContext(config.run.seed, EVALUATION_STEP, torch.tensor(numbers), training=False)
        statistics = score(batch, rng)[1]
        unknown = torch.full((len(numbers),), math.nan)
        sums = (statistics.get(name, unknown).tolist() for name in ("costs", "weights"))
        values = [each.double().flatten().tolist() for each in statistics["predicted"]]
        found += [list(row) for row in zip(numbers, values, *sums, strict=True)]
    table = {row[0]: row[1:] for share in ranks.gather(found) for row in share}
    return [Prediction(np.array(table[i][0], dtype=np.float64), *table[i][1:]) for i in range(len(examples))]


def answers(form: Form, examples: Sequence[Encoded], predicted: Sequence[Prediction]) -> list[Any]:
    return [form.answer(example, each.values) for example, each in zip(examples, predicted, strict=True)]


def selection_of(config: FinetuneConfig) -> Selection:
    """The rule of the best checkpoint, by `evaluation.metric`, which an opened run's configuration has."""
    metric = str(config.evaluation.metric)
    return Selection(f"evaluation/{metric}", config.evaluation.patience, lower=metric in LOWER_IS_BETTER)


def validation(run: TaskRun, engine: Engine, hooks: RunHooks) -> Evaluate:
    """A function that the training loop calls after every step. Where a validation is due it returns evaluation/loss
    (the costs of all examples by their weights) and evaluation/METRIC for each of the task's. It raises StopWanted as
    `check_stop` does.
    """
    config, every, steps = run.config, run.config.evaluation.every, run.config.training.steps
    examples, form, model = run.validation, run.form, engine.module

    def validate(step: int) -> dict[str, float]:
        if step % every and step != steps:
            return {}
        model.eval()
        try:
            pause = lambda: check_stop(hooks, engine.ranks, "validation")  # noqa: E731
            predicted = predict_examples(engine.evaluate, form, examples, config, engine.ranks, pause)
        finally:
            model.train()
        loss = math.fsum(each.cost for each in predicted) / math.fsum(each.weight for each in predicted)
        found = form.measures(examples, answers(form, examples, predicted))
        return {"evaluation/loss": loss, **{f"evaluation/{name}": value for name, value in found.items()}}

    return validate


Row = dict[str, Any]
"""A prediction: `name` of the example, its `file` and `line` (null where it has the file to itself), `label` (null
where it has none), `predicted`, and what the task's form adds, such as `probabilities` of classes."""


def read(found: Finetuned, examples: Iterable[Example], name: str, say: Callable[[str], None]) -> Sequence[Encoded]:
    """Encode examples for the model. say: prints their counts."""
    return found.form.collected(encode_all(found.encoder, name, examples, say))


def predicted(found: Finetuned, examples: Sequence[Encoded], seed: int | None = None) -> list[Prediction]:
    """Predict with a progress bar. seed: of the draws of randomised attention; None takes `run.seed`. Raises UserError
    where a prediction is not finite.
    """
    config = found.config
    if seed is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    total = -(-len(examples) // config.evaluation.batch)
    with torch.no_grad(), tqdm(total=total, desc="scoring", unit="batch", leave=False, disable=None) as bar:
        table = predict_examples(found.model, found.form, examples, config, found.ranks, bar.update)
    if not all(np.isfinite(each.values).all() for each in table):
        hint = "Take an earlier checkpoint, or --set training.precision=fp32"
        raise UserError(f"{found.checkpoint.path}: the predictions are not finite. {hint}")
    return table


def predictions(form: Form, examples: Sequence[Encoded], table: Sequence[Prediction]) -> list[Row]:
    """The rows of a prediction file, in the order of the examples."""
    return [
        {
            "name": example.name,
            "file": str(example.location.file),
            "line": example.location.line,
            **form.row(example, own.values),
        }
        for example, own in zip(examples, table, strict=True)
    ]


def predict(found: Finetuned, sources: Sequence[str], say: Callable[[str], None]) -> list[Row]:
    """Predictions for every example of the files, in their order. Raises DataError where there is none."""
    _, files = chosen_files(found.task, sources, None)
    encoded = read(found, read_files(found.task, files), "new", say)
    if not encoded:
        raise DataError(sources[0], "has no examples", "Give files that have some")
    return predictions(found.form, encoded, predicted(found, encoded))


def predict_texts(found: Finetuned, texts: Sequence[str], say: Callable[[str], None]) -> Row:
    """The prediction for one example, given by its texts. Raises ConfigError where the task has other inputs."""
    encoded = read(found, [found.form.example(texts)], "new", say)
    return predictions(found.form, encoded, predicted(found, encoded))[0]


def write_predictions(path: Path, rows: Sequence[Row], form: Form) -> None:
    """Write a file by its suffix: .jsonl, an object a line; .json, an object of `predicted` by name, WikiHop's form of
    submission; .csv, `name`, `predicted` and `probability of CLASS`; .tsv, GLUE's form of submission, `index` and
    `prediction`; .txt, a line each as the task's form has it. Raises ConfigError for another suffix, DataError for a
    name that a .tsv cannot hold, or that a .json would have twice, and UserError where it cannot be written.
    """
    require_form(path)
    with whole_file(path) as out:
        for line in FORMS[path.suffix](rows, form):
            out.write(line.encode())


def require_form(path: Path) -> None:
    """Raise ConfigError for a suffix of no known form."""
    if path.suffix not in FORMS:
        problem = f'"{path.suffix}" is no known form of predictions: {path}'
        raise ConfigError("--output", problem, f"Give a name that ends in {', '.join(FORMS)}")


def _json_lines(rows: Sequence[Row], form: Form) -> Iterator[str]:
    for row in rows:
        yield json.dumps(row) + "\n"


def _json_object(rows: Sequence[Row], form: Form) -> Iterator[str]:
    table: dict[str, Any] = {}
    for row in rows:
        if row["name"] in table:
            location = str(SourceLocation(Path(row["file"]), row["line"]))
            raise DataError(location, f'"{row["name"]}" comes twice, which a .json cannot hold', "Write a .jsonl")
        table[row["name"]] = row["predicted"]
    yield json.dumps(table, indent=1) + "\n"


def _lines(rows: Sequence[Row], form: Form) -> Iterator[str]:
    for row in rows:
        yield form.line(row) + "\n"


def _comma_separated(rows: Sequence[Row], form: Form) -> Iterator[str]:
    classes = list(rows[0].get("probabilities") or ())
    table = [["name", "predicted", *(f"probability of {name}" for name in classes)]]
    table += [[row["name"], _cell(row["predicted"]), *((row.get("probabilities") or {}).values())] for row in rows]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(table)
    yield out.getvalue()


def _tab_separated(rows: Sequence[Row], form: Form) -> Iterator[str]:
    yield "index\tprediction\n"
    for row in rows:
        fields = [str(row["name"]), str(_cell(row["predicted"]))]
        if any(mark in field for field in fields for mark in "\t\r\n"):
            location = str(SourceLocation(Path(row["file"]), row["line"]))
            raise DataError(location, f"{fields} has a tab or a line end, which a .tsv cannot hold", "Write a .csv")
        yield "\t".join(fields) + "\n"


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


FORMS: dict[str, Callable[[Sequence[Row], Form], Iterator[str]]] = {
    ".jsonl": _json_lines,
    ".json": _json_object,
    ".txt": _lines,
    ".csv": _comma_separated,
    ".tsv": _tab_separated,
}


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
