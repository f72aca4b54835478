"""Fine-tuning runs: their preparation, the loading of a finished one, and its evaluation. N examples."""

import csv
import io
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from megasparse import __version__
from megasparse.config.files import find_file
from megasparse.config.finetuning import FinetuneConfig
from megasparse.data.batches import Steps, check_shares
from megasparse.data.order import permutation
from megasparse.errors import CheckpointError, ConfigError, DataError, UserError, did_you_mean
from megasparse.evaluation.outputs import write_output
from megasparse.evaluation.results import load_for_evaluation
from megasparse.ops.random import EVALUATION_STEP, RngContext
from megasparse.settings.load import build_settings
from megasparse.tasks.batches import EncodedExample, ExampleBatches
from megasparse.tasks.body import add_adapters
from megasparse.tasks.catalog import build_task
from megasparse.tasks.form import ChoiceForm, Form, LabelForm, column
from megasparse.tasks.forms.forecast import ForecastForm
from megasparse.tasks.forms.ranking import RankingForm
from megasparse.tasks.forms.texts import TextForm, TokenBatches, packed, sizes_of
from megasparse.tasks.metrics import METRICS, RESAMPLES, bootstrap_interval, require_metrics, signature, t_interval
from megasparse.tasks.start import COPY, FOLDER, Start, body_of_run, open_start, require_length
from megasparse.tasks.task import Example, SourceLocation, Task, chosen_files, sha256_of, split_files
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import find_checkpoint, read_manifest
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, RunHooks, check_stop, start_ranks
from megasparse.training.run import Evaluate

FORMS: dict[str, type[Form]] = {
    "labels": LabelForm, "choice": ChoiceForm, "forecast": ForecastForm, "ranking": RankingForm, "texts": TextForm,
}  # fmt: skip


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned model with all that is needed for predictions."""

    model: Any  # the model of `form.model` in evaluation mode, in the precision and on the device of its run
    form: Form  # form of its training task, or of another task with the same form and classes
    config: FinetuneConfig
    checkpoint: Checkpoint
    ranks: Ranks


def restore_task(directory: str | Path, overrides: Sequence[str] = (), task: str | None = None) -> Finetuned:
    """Load the model of a fine-tuning run.

    directory: a run's folder, for its best checkpoint by validation (without validation, its newest), or a checkpoint.
    overrides: `section.key=value` changes to the checkpoint's configuration. task: name of another task with the same
    classes. Raises CheckpointError if there is no checkpoint of a task, or it is damaged; ConfigError for an invalid
    override or task.
    """
    checkpoint = Checkpoint.open(chosen_checkpoint(Path(directory)))
    settings = checkpoint.settings
    if not isinstance(settings, FinetuneConfig):
        raise CheckpointError(checkpoint.path, "belongs to a pretrained model", "Fine-tune it first, or use --data")
    trained = build_task(settings.task)
    changes = [] if task in (None, trained.name) else [f"task.name={json.dumps(task)}"]
    if changes and task == "table":
        changes.append(f"task.labels={json.dumps(list(trained.classes or ()))}")
    config = build_settings(settings.model_dump(mode="json"), [*overrides, *changes], FinetuneConfig)
    for key in ("model", "lora"):
        if getattr(config, key) != getattr(settings, key):
            raise ConfigError(key, "cannot be changed in a fine-tuned model", f"Omit --set {key}…")
    chosen = build_task(config.task)
    traits = [(one.form, one.classes, one.towers, one.vocabulary) for one in (chosen, trained)]
    if traits[0] != traits[1]:
        raise ConfigError("--task", f'"{chosen.name}" has other classes or inputs', f"Use --task {trained.name}")
    run = Path(os.path.abspath(checkpoint.path)).parents[1]
    form = FORMS[chosen.form](chosen, config)
    body, tokenizer = body_of_run(run, settings.changed(start=config.start), form, checkpoint)
    if tokenizer.sha256 != checkpoint.manifest["tokenizer"].get("sha256"):
        raise CheckpointError(run / FOLDER, "its tokenizer is not the one of the checkpoint's training", COPY)
    require_length(config, body)
    ranks = start_ranks(config.run.changed(engine="torch"))
    model = form.model(body)
    load_for_evaluation(model, checkpoint, config.training.precision, ranks)
    form.prepare(body, tokenizer)
    return Finetuned(model, form, config, checkpoint, ranks)


def chosen_checkpoint(directory: Path) -> Path:
    """Return `directory` if it is a checkpoint, else a run's best checkpoint by validation, else its newest."""
    newest = find_checkpoint(directory)
    best = newest != directory and (read_manifest(newest).get("state", {}).get("selection") or {}).get("step")
    return newest.with_name(f"{best:08d}") if best else newest


HELD_OUT = 1 << 20  # key of the permutation that selects held-out examples; not the number of an epoch


@dataclass(frozen=True)
class TaskRun:
    """Parts of a fine-tuning run."""

    config: FinetuneConfig  # with the number of steps, labels and digest of the pretrained weights filled in
    form: Form
    start: Start
    model: Any  # the model of `form.model` around the start's body
    train: Sequence[EncodedExample]
    validation: Sequence[EncodedExample]

    def batches(self, ranks: Ranks, position: int) -> Steps:
        """Return this rank's steps from sample number `position` on."""
        training = self.config.training
        check_shares(training.global_batch, training.micro_batch, ranks.world_size)
        kind: Any = TokenBatches if training.batch_unit == "tokens" else ExampleBatches
        return kind(
            self.train, seed=self.config.run.seed, global_batch=training.global_batch, ranks=ranks, start=position,
            micro_batch=training.micro_batch, collate=self.form.collate,
        )  # fmt: skip


def open_run(config: FinetuneConfig, say: Callable[[str], None]) -> TaskRun:
    """Read and encode the examples, and build the model. say: prints the counts of the examples.

    Raises DataError naming file and line of a bad example; the errors of `build_task` and `open_start`; UserError if a
    library for the metrics is missing.
    """
    task = build_task(config.task)
    require_metrics(task.metrics)
    metric = config.evaluation.metric or task.metrics[0]
    if metric not in task.metrics:
        raise ConfigError("evaluation.metric", f'"{metric}"', did_you_mean(metric, task.metrics))
    if config.training.batch_unit == "tokens" and task.form != "texts":
        raise ConfigError("training.batch_unit", f'"tokens", but {task.name} writes no texts', 'Set it to "examples"')
    form = FORMS[task.form](task, config)
    train, validation = read_examples(task, config)
    start = open_start(config, form, form.sketch_labels(train))
    form.check(start.body)
    if config.lora is not None:
        add_adapters(start.body, config.lora, config.run.seed)
    model = form.model(start.body)
    form.prepare(start.body, start.tokenizer)
    encoded, kinds = [], []
    for split, examples in (("training", train), ("validation", validation)):
        encoded.append(encode_all(form, split, examples, say))
        kinds.append(form.counts.kinds.keys())
    for warning in task.warnings:
        say(warning)
    if task.classes and (unseen := sorted(kinds[1] - kinds[0])):
        say(f"warning: the training data contains no examples of {', '.join(unseen)[:200]}, unlike the validation data")
    return TaskRun(_resolved(config, task, start, model, encoded[0]), form, start, model, *encoded)


def encode_all(form: Form, split: str, examples: Iterable[Example], say: Callable[[str], None]) -> list[EncodedExample]:
    """Encode with a progress bar, then print the counts with `say`."""
    bar = tqdm(examples, desc=f"reading {split} examples", unit="", leave=False, disable=None)
    encoded = list(form.encode(bar))
    for line in form.lines(split):
        say(line)
    return encoded


def read_examples(task: Task, config: FinetuneConfig) -> tuple[list[Example], list[Example]]:
    """Return training and validation examples. Raises DataError if there are none, or if one lacks a label."""
    settings, seed, source = config.task, config.run.seed, find_file(config.task.source)
    train = list(read_files(task, split_files(task, source, "train")))
    other = None if settings.validation is None else find_file(settings.validation)
    if other is not None and not other.is_dir():
        held_out = list(task.read(other))
    elif other is not None or "validation" in task.files(source):  # the official split of the source, or your folder
        held_out = list(read_files(task, split_files(task, other or source, "validation")))
    else:
        order = permutation(len(train), seed, HELD_OUT)
        count = max(1, round(settings.validation_fraction * len(train)))
        if count >= len(train):
            raise DataError(settings.source, f"{len(train)} examples are too few to hold some out", "Add examples")
        held_out, train = ([train[i] for i in sorted(part)] for part in (order[:count], order[count:]))
    if settings.limit and settings.limit < len(train):
        train = [train[i] for i in sorted(permutation(len(train), seed, HELD_OUT, 1)[: settings.limit])]
    return list(labelled(train, "training", source)), list(labelled(held_out, "validation", source))


def read_files(task: Task, files: Sequence[Path]) -> Iterator[Example]:
    for file in files:
        yield from task.read(file)


def labelled(examples: Iterable[Example], name: str, source: str | Path) -> Iterator[Example]:
    """Yield the examples. Raises DataError if there are none, or if one lacks a label."""
    example = None
    for example in examples:
        if example.label is None:
            raise DataError(example.location, "lacks a label", "Use a labelled file; megasparse predict labels others")
        yield example
    if example is None:
        raise DataError(source, f"contains no {name} examples", "Use files with examples")


def _resolved(config: FinetuneConfig, task: Task, start: Start, model: Any, train: Sequence[Any]) -> FinetuneConfig:
    """Complete the configuration from data and weights. The first epoch's examples or packs set numbers of steps."""
    training, optimizer, evaluation = config.training, config.optimizer, config.evaluation
    number, batch, steps = len(train), training.global_batch, training.steps
    if training.batch_unit == "tokens":
        number = len(packed(sizes_of(train, training.micro_batch), training.micro_batch, config.run.seed, 0))
        batch = max(1, training.global_batch // training.micro_batch)
    if training.epochs:
        steps = max(1, math.ceil(training.epochs * number / batch))
    warmup = round(optimizer.warmup_fraction * steps) if optimizer.warmup_fraction else optimizer.warmup_steps
    every, metric = evaluation.every or math.ceil(number / batch), evaluation.metric or task.metrics[0]
    changes: dict[str, Any] = {
        "training": {"steps": steps}, "optimizer": {"warmup_steps": warmup}, "start": {"sha256": start.sha256},
        "evaluation": {"every": every, "metric": metric}, "head": {"pooling": getattr(model, "pooling", None)},
    }  # fmt: skip
    return config.changed(**changes, task=task.config)


Row = dict[str, Any]
"""A prediction: `name` of the example, its `file` and `line` (null if it is the whole file), `label` (null if unknown),
`predicted`, and fields of the task's form, such as `probabilities` of classes."""


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
    """Return the model's predictions for all examples, on every rank. They do not depend on the batch or rank of an
    example.

    score: a form's model in evaluation, or its engine. The ranks split the batches. pause: called before each batch.
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
    return [form.answer(example, output.values) for example, output in zip(examples, table, strict=True)]


def validation(run: TaskRun, engine: Engine, hooks: RunHooks) -> Evaluate:
    """Return a validation function for the training loop, called after every step.

    When a validation is due, it returns evaluation/loss (the examples' weighted mean cost) and evaluation/METRIC for
    each metric of the task. Raises StopWanted as `check_stop` does.
    """
    config, form, examples, model = run.config, run.form, run.validation, engine.module

    def validate(step: int) -> dict[str, float]:
        if step % config.evaluation.every and step != config.training.steps:
            return {}
        model.eval()
        try:
            pause = lambda: check_stop(hooks, engine.ranks, "validation")  # noqa: E731
            table = predict_examples(engine.evaluate, form, examples, config, engine.ranks, pause)
        finally:
            model.train()
        loss = math.fsum(output.cost for output in table) / math.fsum(output.weight for output in table)
        measures = form.measures(examples, answers(form, examples, table))
        return {f"evaluation/{name}": value for name, value in {"loss": loss, **measures}.items()}

    return validate


def predicted(model: Finetuned, examples: Sequence[EncodedExample]) -> list[Prediction]:
    """Predict with a progress bar. Raises UserError if a prediction is not finite."""
    total = -(-len(examples) // model.config.evaluation.batch)
    with torch.no_grad(), tqdm(total=total, desc="scoring", unit="batch", leave=False, disable=None) as bar:
        table = predict_examples(model.model, model.form, examples, model.config, model.ranks, bar.update)
    if not all(np.isfinite(output.values).all() for output in table):
        raise UserError(f"{model.checkpoint.path}: the predictions are not finite. Use an earlier checkpoint, or fp32")
    return table


def predictions(form: Form, examples: Sequence[EncodedExample], table: Sequence[Prediction]) -> list[Row]:
    """Return the rows of a prediction file, in the order of the examples."""
    rows = []
    for example, output in zip(examples, table, strict=True):
        location = {"file": str(example.location.file), "line": example.location.line}
        rows.append({"name": example.name, **location, **form.row(example, output.values)})
    return rows


def predict(model: Finetuned, sources: Sequence[str], say: Callable[[str], None], split: str | None) -> list[Row]:
    """Predict the examples of `chosen_files` in order, whatever their labels. Raises DataError if there are none."""
    task = model.form.task
    task.needs_labels, task.config = False, task.config.changed(empty="keep")
    chosen, files = chosen_files(task, sources, split)
    if rows := _predict(model, read_files(task, files), say, chosen or "new"):
        return rows
    raise DataError(sources[0], "contains no examples", "Use files with examples")


def predict_texts(model: Finetuned, texts: Sequence[str], say: Callable[[str], None]) -> Row:
    """Predict one example from its texts. Raises ConfigError if the task has other inputs."""
    return _predict(model, [model.form.example(texts)], say, "new")[0]


def _predict(model: Finetuned, examples: Iterable[Example], say: Callable[[str], None], title: str) -> list[Row]:
    encoded = encode_all(model.form, title, examples, say)
    return predictions(model.form, encoded, predicted(model, encoded))


def _text(row: Row) -> str:
    value = row["predicted"]
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def _location(row: Row) -> str:
    return str(SourceLocation(Path(row["file"]), row["line"]))


def _json_lines(rows: Sequence[Row]) -> str:
    """Return one object per line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def _json_by_name(rows: Sequence[Row]) -> str:
    """Return an object of `predicted` by name, WikiHop's submission format."""
    values: dict[str, Any] = {}
    for row in rows:
        if (name := row["name"]) in values:
            raise DataError(_location(row), f'"{name}" occurs twice, which a .json cannot contain', "Write a .jsonl")
        values[name] = row["predicted"]
    return json.dumps(values, indent=1) + "\n"


def _csv_table(rows: Sequence[Row]) -> str:
    """Return `name`, `predicted` and `probability of CLASS`."""
    classes = rows[0].get("probabilities") or ()
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["name", "predicted", *(f"probability of {name}" for name in classes)])
    table.writerows([row["name"], _text(row), *(row["probabilities"][one] for one in classes)] for row in rows)
    return out.getvalue()


def _glue_table(rows: Sequence[Row]) -> str:
    """Return GLUE's submission format, `index` and `prediction`."""
    out = "index\tprediction\n"
    for row in rows:
        name, text = row["name"], _text(row)
        if any(mark in f"{name}{text}" for mark in "\t\r\n"):
            raise DataError(_location(row), f"{[name, text]} contains a tab or a line end", "Write a .csv")
        out += f"{name}\t{text}\n"
    return out


WRITERS = {".jsonl": _json_lines, ".json": _json_by_name, ".csv": _csv_table, ".tsv": _glue_table}
"""Suffix of a file of predictions -> its content."""


def require_form(path: Path) -> None:
    """Raise ConfigError if the suffix is not in WRITERS."""
    if path.suffix not in WRITERS:
        raise ConfigError("--output", f'"{path.suffix}" is not a format of predictions', f"Use {', '.join(WRITERS)}")


def write_predictions(path: Path, rows: Sequence[Row]) -> None:
    """Write a file in the format of its suffix. Raises DataError if the format cannot contain a name."""
    require_form(path)
    write_output(path, WRITERS[path.suffix](rows))


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

    directories, overrides, name: See `restore_task`. sources, split: See `chosen_files`. say: Prints the counts of the
    examples.

    Returns the result and the first checkpoint's predictions. Each metric has `value`, `low` and `high`: for one
    checkpoint the bootstrap interval over examples, for several the mean with Student's t interval, and their
    `standard_deviation`. `signatures`: settings and version of a metric's library. Raises ConfigError if the same
    checkpoint is given twice, and the errors of `restore_task` and the task's reader.
    """
    paths = [chosen_checkpoint(Path(directory)).resolve() for directory in directories]
    if repeated := [path for number, path in enumerate(paths) if path in paths[:number]]:
        raise ConfigError("--checkpoint", f"{repeated[0]} is given twice", "Name each once")
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
        encoded = encode_all(form, title, labelled(read_files(task, files), title, files[0]), say)
        table, counts = predicted(model, encoded), form.counts
        outputs = answers(form, encoded, table)
        runs.append({
            "checkpoint": str(model.checkpoint.path), "step": model.checkpoint.step, "seed": model.config.run.seed,
            "metrics": form.measures(encoded, outputs), "attention": model.model.body.attention(),
            "precision": model.config.training.precision, "max_length": model.config.task.max_length,
            "inputs": {"cut": counts.cut, "empty": counts.empty, "longest": counts.longest},
        })  # fmt: skip
        first = first or (form, encoded, table, outputs)
    form, encoded, table, outputs = first
    metrics, several, labels = {}, len(runs) > 1, column([example.label for example in encoded])
    for metric in form.task.metrics:
        values = [entry["metrics"][metric] for entry in runs]
        if several:
            low, high = t_interval(values)
        else:
            with tqdm(total=RESAMPLES, desc=f"resampling {metric}", leave=False, disable=None) as bar:
                low, high = bootstrap_interval(METRICS[metric], labels, column(outputs), runs[0]["seed"], bar.update)
        mean, deviation = statistics.fmean(values), statistics.stdev(values) if several else None
        metrics[metric] = {"value": mean, "low": low, "high": high, "standard_deviation": deviation}
    kind = f"Student's t over {len(runs)} runs" if several else f"bootstrap over examples, {RESAMPLES:,} resamples"
    versions = {name: one.version for name in LIBRARIES for one in distributions(name=name)}
    result = {
        "task": form.task.name, "split": chosen,
        "files": [{"file": str(file), "sha256": sha256_of(file)} for file in files],
        "examples": len(encoded), "metrics": metrics,
        "signatures": {name: text for name in form.task.metrics if (text := signature(name)) is not None},
        "interval": f"95 %, {kind}", "runs": runs,
        "versions": {"python": platform.python_version(), "megasparse": __version__, **versions},
    }  # fmt: skip
    return result, predictions(form, encoded, table)


def summary(result: dict[str, Any]) -> str:
    """Return the summary that megasparse evaluate prints."""
    source = result["split"] or ", ".join(file["file"] for file in result["files"])
    runs = result["runs"]
    seeds = f"{len(runs)} runs, seeds {', '.join(str(run['seed']) for run in runs)}"
    title = seeds if len(runs) > 1 else f"step {runs[0]['step']} of {runs[0]['checkpoint']}"
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
