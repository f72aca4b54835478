"""Preparation of a fine-tuning run (task, examples, model, configuration), and loading of a finished one."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megasparse.config.files import find_file
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.load import build_settings
from megasparse.data.batches import Steps, check_shares
from megasparse.data.order import permutation
from megasparse.errors import CheckpointError, ConfigError, DataError, did_you_mean
from megasparse.tasks.backbones import add_adapters
from megasparse.tasks.batches import EncodedExample, ExampleBatches
from megasparse.tasks.catalog import build_task
from megasparse.tasks.form import Form
from megasparse.tasks.forms.forecast import ForecastForm
from megasparse.tasks.forms.labels import ChoiceForm, LabelForm
from megasparse.tasks.forms.ranking import RankingForm
from megasparse.tasks.forms.texts import TextForm, TokenBatches, packed, sizes_of
from megasparse.tasks.metrics import require_metrics
from megasparse.tasks.start import FOLDER, Start, body_of_run, open_start, require_length
from megasparse.tasks.task import Example, Task, split_files
from megasparse.training.checkpoints.checkpoint import Checkpoint, find_checkpoint, load_weights
from megasparse.training.checkpoints.manifest import read_manifest
from megasparse.training.ranks import Ranks, start_ranks

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

    Args:
        directory: A run's folder, for its best checkpoint by validation (without validation, its newest), or a
            checkpoint.
        overrides: `section.key=value` changes to the checkpoint's configuration.
        task: Name of another task with the same classes, instead of the training task.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it belongs to a pretraining run.
        ConfigError: An override is invalid, or the task is incompatible.
    """
    checkpoint = Checkpoint.open(chosen_checkpoint(Path(directory)))
    settings = checkpoint.settings
    if not isinstance(settings, FinetuneConfig):
        hint = "Evaluate it with megasparse evaluate --data, or fine-tune it first: megasparse finetune"
        raise CheckpointError(checkpoint.path, "belongs to a pretrained model, without a task", hint)
    trained = build_task(settings.task)
    changes = []
    if task not in (None, trained.name):
        changes.append(f"task.name={json.dumps(task)}")
        if task == "table":
            changes.append(f"task.labels={json.dumps(list(trained.classes or ()))}")
    config = build_settings(settings.model_dump(mode="json"), [*overrides, *changes], FinetuneConfig)
    for key in ("model", "lora"):
        if getattr(config, key) != getattr(settings, key):
            raise ConfigError(key, "cannot be changed in a fine-tuned model", f"Omit --set {key}…")
    chosen = build_task(config.task)
    traits = [(one.form, one.classes, one.towers, one.vocabulary) for one in (chosen, trained)]
    if traits[0] != traits[1]:
        problem = f'"{chosen.name}" has other classes or inputs than "{trained.name}", the training task'
        raise ConfigError("--task", problem, f"Use --task {trained.name}, or another task with the same classes")
    run = Path(os.path.abspath(checkpoint.path)).parents[1]
    form = FORMS[chosen.form](chosen, config)
    body, tokenizer = body_of_run(run, settings.model_copy(update={"start": config.start}), form, checkpoint)
    if tokenizer.sha256 != checkpoint.manifest["tokenizer"].get("sha256"):
        hint = "Copy the whole run folder again"
        raise CheckpointError(run / FOLDER, "its tokenizer is not the one of the checkpoint's training", hint)
    require_length(config, body)
    ranks = start_ranks(config.run.model_copy(update={"engine": "torch"}))
    model = form.model(body)
    load_weights(model, checkpoint)
    if config.training.precision == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    form.prepare(body, tokenizer)
    return Finetuned(model.to(ranks.device).eval(), form, config, checkpoint, ranks)


def chosen_checkpoint(directory: Path) -> Path:
    """Return `directory` if it is a checkpoint, else a run's best checkpoint by validation, else its newest."""
    newest = find_checkpoint(directory)
    if newest == directory:
        return directory
    best = (read_manifest(newest).get("state", {}).get("selection") or {}).get("step")
    return newest if best is None else newest.with_name(f"{best:08d}")


HELD_OUT = 1 << 20  # key of the permutation that selects held-out examples; not the number of an epoch


@dataclass(frozen=True)
class TaskRun:
    """Parts of a fine-tuning run."""

    config: FinetuneConfig
    """Configuration with the number of steps, labels and digest of the pretrained weights filled in."""
    form: Form
    start: Start
    model: Any  # the model of `form.model` around the start's body
    train: Sequence[EncodedExample]
    validation: Sequence[EncodedExample]

    def batches(self, ranks: Ranks, position: int) -> Steps:
        """Return this rank's steps from sample number `position` on. Raises ConfigError as `check_shares` does."""
        training = self.config.training
        check_shares(training.global_batch, training.micro_batch, ranks.world_size)
        kind: Any = TokenBatches if training.batch_unit == "tokens" else ExampleBatches
        return kind(
            self.train, seed=self.config.run.seed, global_batch=training.global_batch, ranks=ranks, start=position,
            micro_batch=training.micro_batch, collate=self.form.collate,
        )  # fmt: skip


def open_run(config: FinetuneConfig, say: Callable[[str], None]) -> TaskRun:
    """Read and encode the examples, and build the model. say: prints the counts of the examples.

    Raises DataError naming file and line of a bad example; ConfigError, CheckpointError and HubError as `build_task`
    and `open_start` do; UserError if a library for the metrics is missing.
    """
    task = build_task(config.task)
    require_metrics(task.metrics)
    metric = config.evaluation.metric or task.metrics[0]
    if metric not in task.metrics:
        raise ConfigError("evaluation.metric", f'"{metric}"', did_you_mean(metric, task.metrics))
    if config.training.batch_unit == "tokens" and task.form != "texts":
        problem = f'"tokens" needs tasks whose answers are texts, unlike {task.name}'
        raise ConfigError("training.batch_unit", problem, 'Set it to "examples"')
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
    files = split_files(task, source, "train")
    held_out_files = None  # the official split of the source, or your own folder or file
    if settings.validation is not None and not (other := Path(settings.validation)).is_dir():
        held_out_files = [other]
    elif settings.validation is not None or "validation" in task.files(source):
        held_out_files = split_files(task, Path(settings.validation or source), "validation")
    train = list(read_files(task, files))
    if held_out_files is not None:
        held_out = list(read_files(task, held_out_files))
    else:
        order = permutation(len(train), seed, HELD_OUT)
        count = max(1, round(settings.validation_fraction * len(train)))
        if count >= len(train):
            raise DataError(settings.source, f"{len(train)} examples are too few to hold some out", "Add examples")
        held_out = [train[i] for i in sorted(order[:count])]
        train = [train[i] for i in sorted(order[count:])]
    if settings.limit and settings.limit < len(train):
        train = [train[i] for i in sorted(permutation(len(train), seed, HELD_OUT, 1)[: settings.limit])]
    return list(labelled(train, "training", source)), list(labelled(held_out, "validation", source))


def read_files(task: Task, files: Sequence[Path]) -> Iterator[Example]:
    """Read the examples of all files of a split."""
    for file in files:
        yield from task.read(file)


def labelled(examples: Iterable[Example], name: str, source: str | Path) -> Iterator[Example]:
    """Yield the examples. Raises DataError if there are none, or if one lacks a label."""
    empty = True
    for example in examples:
        empty = False
        if example.label is None:
            hint = "Use a labelled file; megasparse predict labels others"
            raise DataError(str(example.location), "lacks a label to learn from or to compare with", hint)
        yield example
    if empty:
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
    changes = {
        "training": {"steps": steps},
        "optimizer": {"warmup_steps": warmup},
        "evaluation": {
            "every": evaluation.every or math.ceil(number / batch), "metric": evaluation.metric or task.metrics[0],
        },
        "start": {"sha256": start.sha256},
        "head": {"pooling": getattr(model, "pooling", None)},
    }  # fmt: skip
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update={**sections, "task": task.config})
