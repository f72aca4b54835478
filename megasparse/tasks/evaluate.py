"""Evaluation of fine-tuned models: predictions, official metrics with intervals, and files. N examples."""

import csv
import io
import json
import math
import platform
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
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
from megasparse.tasks.batches import EncodedExample
from megasparse.tasks.form import Form, column
from megasparse.tasks.metrics import METRICS, RESAMPLES, bootstrap_interval, require_metrics, signature, t_interval
from megasparse.tasks.run import Finetuned, TaskRun, chosen_checkpoint, encode_all, labelled, read_files, restore_task
from megasparse.tasks.task import SourceLocation, chosen_files, sha256_of
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, RunHooks, check_stop
from megasparse.training.run import Evaluate


class Prediction(NamedTuple):
    """The model's output for an example."""

    values: np.ndarray  # flat float64, the input of the form's `answer`
    cost: float
    weight: float  # the loss is the sum of costs divided by the sum of weights; both are NaN without a label


def predict_examples(
    score: Callable[[Any, RngContext], tuple[Any, dict[str, Any]]],
    form: Form,
    examples: Sequence[EncodedExample],
    config: FinetuneConfig,
    ranks: Ranks,
    pause: Callable[[], object] = lambda: None,
) -> list[Prediction]:
    """Return the model's predictions for all examples, on every rank.

    score: a form's model in evaluation, or its engine. The ranks split the batches; each scores the same number.
    Predictions do not depend on the batch or rank of an example. pause: called before each batch.
    """
    order = sorted(range(len(examples)), key=lambda i: -examples[i].length)
    size = config.evaluation.batch
    batches = [order[first : first + size] for first in range(0, len(order), size)]
    batches += batches[:1] * (-len(batches) % ranks.world_size)
    share: list[list[Any]] = []
    for numbers in batches[ranks.rank :: ranks.world_size]:
        pause()
        batch = form.collate([examples[i] for i in numbers]).to(ranks.device)
        rng = RngContext(config.run.seed, EVALUATION_STEP, torch.tensor(numbers), training=False)
        statistics = score(batch, rng)[1]
        unknown = torch.full((len(numbers),), math.nan)
        sums = (statistics.get(name, unknown).tolist() for name in ("costs", "weights"))
        values = [output.double().flatten().tolist() for output in statistics["predicted"]]
        share += [list(row) for row in zip(numbers, values, *sums, strict=True)]
    table = {row[0]: row[1:] for rows in ranks.gather(share) for row in rows}
    return [Prediction(np.array(table[i][0], dtype=np.float64), *table[i][1:]) for i in range(len(examples))]


def answers(form: Form, examples: Sequence[EncodedExample], table: Sequence[Prediction]) -> list[Any]:
    """Return the answers that metrics compare with labels."""
    return [form.answer(example, output.values) for example, output in zip(examples, table, strict=True)]


def validation(run: TaskRun, engine: Engine, hooks: RunHooks) -> Evaluate:
    """Return a validation function for the training loop, called after every step.

    When a validation is due, it returns evaluation/loss (the examples' weighted mean cost) and evaluation/METRIC for
    each metric of the task. Raises StopWanted as `check_stop` does.
    """
    config, every, steps = run.config, run.config.evaluation.every, run.config.training.steps
    examples, form, model = run.validation, run.form, engine.module

    def validate(step: int) -> dict[str, float]:
        if step % every and step != steps:
            return {}
        model.eval()
        try:
            pause = lambda: check_stop(hooks, engine.ranks, "validation")  # noqa: E731
            table = predict_examples(engine.evaluate, form, examples, config, engine.ranks, pause)
        finally:
            model.train()
        loss = math.fsum(output.cost for output in table) / math.fsum(output.weight for output in table)
        measures = form.measures(examples, answers(form, examples, table))
        return {"evaluation/loss": loss, **{f"evaluation/{name}": value for name, value in measures.items()}}

    return validate


Row = dict[str, Any]
"""A prediction: `name` of the example, its `file` and `line` (null if it is the whole file), `label` (null if unknown),
`predicted`, and fields of the task's form, such as `probabilities` of classes."""


def predicted(model: Finetuned, examples: Sequence[EncodedExample]) -> list[Prediction]:
    """Predict with a progress bar. Raises UserError if a prediction is not finite."""
    total = -(-len(examples) // model.config.evaluation.batch)
    with torch.no_grad(), tqdm(total=total, desc="scoring", unit="batch", leave=False, disable=None) as bar:
        table = predict_examples(model.model, model.form, examples, model.config, model.ranks, bar.update)
    if not all(np.isfinite(output.values).all() for output in table):
        hint = "Use an earlier checkpoint, or --set training.precision=fp32"
        raise UserError(f"{model.checkpoint.path}: the predictions are not finite. {hint}")
    return table


def predictions(form: Form, examples: Sequence[EncodedExample], table: Sequence[Prediction]) -> list[Row]:
    """Return the rows of a prediction file, in the order of the examples."""
    rows = []
    for example, output in zip(examples, table, strict=True):
        location = {"file": str(example.location.file), "line": example.location.line}
        rows.append({"name": example.name, **location, **form.row(example, output.values)})
    return rows


def predict(model: Finetuned, sources: Sequence[str], say: Callable[[str], None]) -> list[Row]:
    """Predict all examples of the files, in order, whatever their labels. Raises DataError if there are no examples."""
    task = model.form.task
    task.needs_labels, task.config = False, task.config.model_copy(update={"empty": "keep"})
    _, files = chosen_files(task, sources, None)
    encoded = encode_all(model.form, "new", read_files(task, files), say)
    if not encoded:
        raise DataError(sources[0], "contains no examples", "Use files with examples")
    return predictions(model.form, encoded, predicted(model, encoded))


def predict_texts(model: Finetuned, texts: Sequence[str], say: Callable[[str], None]) -> Row:
    """Predict one example from its texts. Raises ConfigError if the task has other inputs."""
    encoded = encode_all(model.form, "new", [model.form.example(texts)], say)
    return predictions(model.form, encoded, predicted(model, encoded))[0]


SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")


def require_form(path: Path) -> None:
    """Raise ConfigError if the suffix is not one of SUFFIXES."""
    if path.suffix not in SUFFIXES:
        problem = f'"{path.suffix}" is not a known format of predictions: {path}'
        raise ConfigError("--output", problem, f"Use a name that ends in {', '.join(SUFFIXES)}")


def write_predictions(path: Path, rows: Sequence[Row]) -> None:
    """Write a file in the format of its suffix.

    .jsonl: one object per line; .json: an object of `predicted` by name, WikiHop's submission format; .csv: `name`,
    `predicted` and `probability of CLASS`; .tsv: GLUE's submission format, `index` and `prediction`.

    Raises:
        ConfigError: Another suffix.
        DataError: A name that a .tsv cannot contain, or that a .json would contain twice.
        UserError: The file cannot be written.
    """
    require_form(path)
    out, answers, suffix = io.StringIO(), dict[str, Any](), path.suffix
    classes, writer = rows[0].get("probabilities") or (), csv.writer(out, lineterminator="\n")
    if suffix == ".csv":
        writer.writerow(["name", "predicted", *(f"probability of {name}" for name in classes)])
    out.write("index\tprediction\n" if suffix == ".tsv" else "")
    for row in rows:
        name, value = row["name"], row["predicted"]
        text = json.dumps(value) if isinstance(value, list | dict) else str(value)
        location = str(SourceLocation(Path(row["file"]), row["line"]))
        if suffix == ".jsonl":
            out.write(json.dumps(row) + "\n")
        elif suffix == ".csv":
            writer.writerow([name, text, *(row["probabilities"][one] for one in classes)])
        elif suffix == ".tsv":
            if any(mark in f"{name}{text}" for mark in "\t\r\n"):
                problem = f"{[name, text]} contains a tab or a line end, which a .tsv cannot contain"
                raise DataError(location, problem, "Write a .csv")
            out.write(f"{name}\t{text}\n")
        elif name in answers:
            raise DataError(location, f'"{name}" occurs twice, which a .json cannot contain', "Write a .jsonl")
        answers[name] = value
    with whole_file(path) as stream:
        stream.write((json.dumps(answers, indent=1) + "\n" if suffix == ".json" else out.getvalue()).encode())


LIBRARIES = ("torch", "numpy", "scipy", "scikit-learn", "sacrebleu", "rouge-score", "tokenizers")
"""Packages whose versions are part of a result."""


def evaluate_checkpoints(
    directories: Sequence[str],
    overrides: Sequence[str],
    name: str,
    sources: Sequence[str],
    split: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, Any], list[Row]]:
    """Score checkpoints of a task on files with labels.

    Args:
        directories, overrides, name: See `restore_task`.
        sources, split: See `chosen_files`.
        say: Prints the counts of the examples.

    Returns:
        The result and the first checkpoint's predictions. Each metric has `value`, `low` and `high`: for one checkpoint
        the bootstrap interval over examples, for several the mean with Student's t interval, and their
        `standard_deviation`. `signatures`: settings and version of a metric's library.

    Raises:
        ConfigError: The same checkpoint is given twice; errors of `restore_task` and the task's reader.
    """
    paths = [chosen_checkpoint(Path(directory)).resolve() for directory in directories]
    if repeated := [path for number, path in enumerate(paths) if path in paths[:number]]:
        hint = "Name each once: they are treated as independent runs"
        raise ConfigError("--checkpoint", f"{repeated[0]} is given twice", hint)
    runs: list[dict[str, Any]] = []
    first: Any = None
    for directory in directories:
        model = restore_task(directory, overrides, name)
        form, task = model.form, model.form.task
        require_metrics(task.metrics)
        chosen, files = chosen_files(task, sources, split)
        if first and first[0].task.classes != task.classes:
            raise ConfigError("--checkpoint", f"{directory} was trained on other classes", "Evaluate it separately")
        title = chosen or "given"
        encoded = encode_all(model.form, title, labelled(read_files(task, files), title, files[0]), say)
        table, counts = predicted(model, encoded), form.counts
        outputs = answers(form, encoded, table)
        runs.append({
            "checkpoint": str(model.checkpoint.path),
            "step": model.checkpoint.step,
            "seed": model.config.run.seed,
            "metrics": form.measures(encoded, outputs),
            "attention": model.model.body.attention(),
            "precision": model.config.training.precision,
            "max_length": model.config.task.max_length,
            "inputs": {"cut": counts.cut, "empty": counts.empty, "longest": counts.longest},
        })  # fmt: skip
        first = first or (form, encoded, table, outputs)
    form, encoded, table, outputs = first
    metrics, several = {}, len(runs) > 1
    for metric in form.task.metrics:
        values = [entry["metrics"][metric] for entry in runs]
        if several:
            low, high = t_interval(values)
        else:
            labels = column([example.label for example in encoded])
            with tqdm(total=RESAMPLES, desc=f"resampling {metric}", leave=False, disable=None) as bar:
                low, high = bootstrap_interval(METRICS[metric], labels, column(outputs), runs[0]["seed"], bar.update)
        deviation = statistics.stdev(values) if several else None
        metrics[metric] = {
            "value": statistics.fmean(values), "low": low, "high": high, "standard_deviation": deviation,
        }  # fmt: skip
    kind = f"Student's t over {len(runs)} runs" if several else f"bootstrap over examples, {RESAMPLES:,} resamples"
    versions = {name: one.version for name in LIBRARIES for one in distributions(name=name)}
    result = {
        "task": form.task.name,
        "split": chosen,
        "files": [{"file": str(file), "sha256": sha256_of(file)} for file in files],
        "examples": len(encoded),
        "metrics": metrics,
        "signatures": {name: text for name in form.task.metrics if (text := signature(name)) is not None},
        "interval": f"95 %, {kind}",
        "runs": runs,
        "versions": {"python": platform.python_version(), "megasparse": __version__, **versions},
    }
    return result, predictions(form, encoded, table)


def summary(result: dict[str, Any]) -> str:
    """Return the summary that megasparse evaluate prints."""
    source = result["split"] or ", ".join(file["file"] for file in result["files"])
    runs = result["runs"]
    title = f"step {runs[0]['step']} of {runs[0]['checkpoint']}"
    if len(runs) > 1:
        title = f"{len(runs)} runs, seeds {', '.join(str(run['seed']) for run in runs)}"
    lines = [f"{result['task']}, {source}: {result['examples']:,} examples; {title}"]
    for name, metric in result["metrics"].items():
        line = f"{name} {metric['value']:.4f}"
        if metric["low"] is not None:
            line += f" ({result['interval']}: {metric['low']:.4f} to {metric['high']:.4f})"
        if metric["standard_deviation"] is not None:
            values = ", ".join(f"{run['metrics'][name]:.4f}" for run in runs)
            line += f"; standard deviation {metric['standard_deviation']:.4f}; each: {values}"
        lines.append(line)
    return "\n".join(lines)
