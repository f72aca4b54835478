"""Evaluation of fine-tuned models: predictions, official metrics with intervals, and files. N examples."""

import csv
import importlib.util
import io
import json
import math
import platform
import statistics
from collections.abc import Callable, Sequence
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
from megasparse.tasks.batches import EncodedExample
from megasparse.tasks.form import Form, column
from megasparse.tasks.metrics import METRICS, RESAMPLES, bootstrap_interval, require_metrics, signature, t_interval
from megasparse.tasks.run import Finetuned, TaskRun, chosen_checkpoint, encode_all, labelled, read_files, restore_task
from megasparse.tasks.task import SourceLocation, chosen_files, sha256_of
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, RunHooks, check_stop
from megasparse.training.run import Evaluate

Score = Callable[[Any, RngContext], tuple[Any, dict[str, Any]]]
"""A model of a task's form in evaluation, or its engine: (batch, rng) -> (objective, statistics)."""


class Prediction(NamedTuple):
    """The model's output for an example."""

    values: np.ndarray
    """Flat float64, the input of the form's `answer`."""
    cost: float
    weight: float
    """The loss is the sum of costs divided by the sum of weights; both are NaN without a label."""


def predict_examples(
    score: Score,
    form: Form,
    examples: Sequence[EncodedExample],
    config: FinetuneConfig,
    ranks: Ranks,
    pause: Callable[[], object] = lambda: None,
) -> list[Prediction]:
    """Return the model's predictions for all examples, on every rank.

    The ranks split the batches; each scores the same number. Predictions do not depend on the batch or rank of an
    example. pause: called before each batch.
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
    """Predict all examples of the files, in order. Labels that cannot be read are ignored, and empty texts are counted.
    Raises DataError if there are no examples.
    """
    task, encoder = model.form.task, model.encoder
    task.needs_labels, task.config = False, task.config.model_copy(update={"empty": "keep"})
    encoder.config = task.config
    _, files = chosen_files(task, sources, None)
    encoded = encode_all(encoder, "new", read_files(task, files), say)
    if not encoded:
        raise DataError(sources[0], "contains no examples", "Use files with examples")
    return predictions(model.form, encoded, predicted(model, encoded))


def predict_texts(model: Finetuned, texts: Sequence[str], say: Callable[[str], None]) -> Row:
    """Predict one example from its texts. Raises ConfigError if the task has other inputs."""
    encoded = encode_all(model.encoder, "new", [model.form.example(texts)], say)
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
    out = io.StringIO()
    if path.suffix == ".jsonl":
        out.writelines(json.dumps(row) + "\n" for row in rows)
    elif path.suffix == ".json":
        answers: dict[str, Any] = {}
        for row in rows:
            if row["name"] in answers:
                problem = f'"{row["name"]}" occurs twice, which a .json cannot contain'
                raise DataError(_location(row), problem, "Write a .jsonl")
            answers[row["name"]] = row["predicted"]
        out.write(json.dumps(answers, indent=1) + "\n")
    else:
        tabs, classes = path.suffix == ".tsv", list(rows[0].get("probabilities") or ())
        form: dict[str, Any] = {"delimiter": "\t", "quotechar": None, "quoting": csv.QUOTE_NONE} if tabs else {}
        writer = csv.writer(out, lineterminator="\n", **form)
        heads = ["name", "predicted", *(f"probability of {name}" for name in classes)]
        writer.writerow(["index", "prediction"] if tabs else heads)
        for row in rows:
            value = row["predicted"]
            cells = [row["name"], json.dumps(value) if isinstance(value, list | dict) else value]
            try:
                writer.writerow(cells if tabs else [*cells, *(row.get("probabilities") or {}).values()])
            except csv.Error:
                problem = f"{cells} contains a tab or a line end, which a .tsv cannot contain"
                raise DataError(_location(row), problem, "Write a .csv") from None
    with whole_file(path) as stream:
        stream.write(out.getvalue().encode())


def _location(row: Row) -> str:
    return str(SourceLocation(Path(row["file"]), row["line"]))


LIBRARIES = {"scikit-learn": "sklearn", "rouge-score": "rouge_score"} | {
    name: name for name in ("torch", "numpy", "scipy", "sacrebleu", "tokenizers")
}
"""Modules of the packages whose versions are part of a result."""


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
        directories: Runs, for their best checkpoints, or checkpoints.
        overrides: `section.key=value` changes to the configuration.
        name: Name of the task.
        sources, split: See `chosen_files`.
        say: Prints the counts of the examples.

    Returns:
        The result, {"task", "split", "files", "examples", "metrics", "signatures", "interval", "runs", "versions"}, and
        the first checkpoint's predictions. Each metric has `value`, `low` and `high`: for one checkpoint the bootstrap
        interval over examples, for several the mean with Student's t interval, and their `standard_deviation`.
        `signatures`: settings and version of a metric's library.

    Raises:
        ConfigError: The same checkpoint is given twice; errors of `restore_task` and the task's reader.
    """
    paths = [chosen_checkpoint(Path(directory)).resolve() for directory in directories]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            hint = "Name each once: they are treated as independent runs"
            raise ConfigError("--checkpoint", f"{path} is given twice", hint)
    runs, first = [], None
    for directory in directories:
        model = restore_task(directory, overrides, name)
        form, task = model.form, model.form.task
        require_metrics(task.metrics)
        chosen, files = chosen_files(task, sources, split)
        if first and first[0].task.classes != task.classes:
            raise ConfigError("--checkpoint", f"{directory} was trained on other classes", "Evaluate it separately")
        split_name = chosen or "given"
        examples = labelled(read_files(task, files), split_name, files[0])
        encoded = encode_all(model.encoder, split_name, examples, say)
        table = predicted(model, encoded)
        outputs, counts = answers(form, encoded, table), model.encoder.counts
        entry = {
            "checkpoint": str(model.checkpoint.path),
            "step": model.checkpoint.step,
            "seed": model.config.run.seed,
            "metrics": form.measures(encoded, outputs),
            "attention": model.model.body.attention(),
            "precision": model.config.training.precision,
            "max_length": model.config.task.max_length,
            "inputs": {"cut": counts.cut, "empty": counts.empty, "longest": counts.longest},
        }
        runs.append(entry)
        first = first or (form, encoded, table, outputs)
    assert first is not None
    form, encoded, table, outputs = first
    metrics = {}
    for metric in form.task.metrics:
        values = [entry["metrics"][metric] for entry in runs]
        interval: tuple[float, float] | None
        if len(runs) > 1:
            interval, deviation = t_interval(values), statistics.stdev(values)
        else:
            labels = column([example.label for example in encoded])
            with tqdm(total=RESAMPLES, desc=f"resampling {metric}", leave=False, disable=None) as bar:
                seed = runs[0]["seed"]
                interval = bootstrap_interval(METRICS[metric], labels, column(outputs), seed, bar.update)
            deviation = None
        low, high = interval or (None, None)
        value = statistics.fmean(values)
        metrics[metric] = {"value": value, "low": low, "high": high, "standard_deviation": deviation}
    result = {
        "task": form.task.name,
        "split": chosen,
        "files": [{"file": str(file), "sha256": sha256_of(file)} for file in files],
        "examples": len(encoded),
        "metrics": metrics,
        "signatures": {name: text for name in form.task.metrics if (text := signature(name)) is not None},
        "interval": f"95 %, Student's t over {len(runs)} runs" if len(runs) > 1
        else f"95 %, bootstrap over examples, {RESAMPLES:,} resamples",
        "runs": runs,
        "versions": {
            "python": platform.python_version(), "megasparse": __version__,
            **{name: version(name) for name in LIBRARIES if importlib.util.find_spec(LIBRARIES[name])},
        },
    }  # fmt: skip
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
