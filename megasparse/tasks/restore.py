"""A fine-tuned model out of its run's folder, for evaluation and predictions."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.load import build_settings
from megasparse.errors import CheckpointError, ConfigError
from megasparse.tasks import build_task
from megasparse.tasks.encoding import Encoder
from megasparse.tasks.form import Form, form_of
from megasparse.tasks.start import FOLDER, Start, body_of_run
from megasparse.tasks.task import Task
from megasparse.training.checkpoints.checkpoint import Checkpoint, find_checkpoint, load_weights
from megasparse.training.checkpoints.manifest import read_manifest
from megasparse.training.ranks import Ranks, start_ranks


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned model with all that it takes to predict new examples."""

    model: Any
    """The model of `form.model` with its weights, in evaluation mode, in the precision and on the device of its run."""
    task: Task
    """The task that it was trained on, or another of the same form and classes."""
    form: Form
    encoder: Encoder
    config: FinetuneConfig
    checkpoint: Checkpoint
    ranks: Ranks


def restore_task(directory: str | Path, overrides: Sequence[str] = (), task: str | None = None) -> Finetuned:
    """The model of a fine-tuning run.

    directory: a run's folder, whose best checkpoint by its validation is taken (the newest where there was none yet),
    or one of its checkpoints. overrides: `section.key=value`, on the configuration that the checkpoint holds. task: the
    name of another task of the same classes, in place of the one it was trained on.
    Raises CheckpointError where there is none, it is damaged, or it is of a pretraining run; ConfigError for a wrong
    override, and for a task that does not fit.
    """
    checkpoint = Checkpoint.open(chosen_checkpoint(Path(directory)))
    settings = checkpoint.settings
    if not isinstance(settings, FinetuneConfig):
        hint = "Evaluate it with megasparse evaluate --data, or fine-tune it first: megasparse finetune"
        raise CheckpointError(checkpoint.path, "is of a pretrained model, which knows no task", hint)
    trained = build_task(settings.task)
    values = settings.model_dump(mode="json")
    config = build_settings(values, [*overrides, *_in_place_of(trained, task)], FinetuneConfig)
    for key in ("model", "lora"):
        if getattr(config, key) != getattr(settings, key):
            raise ConfigError(key, "a fine-tuned model is read as it was trained", f"Leave out --set {key}…")
    chosen = build_task(config.task)
    _require_alike(trained, chosen)
    run = Path(os.path.abspath(checkpoint.path)).parents[1]
    form = form_of(chosen, config)
    body, tokenizer = body_of_run(run, settings.model_copy(update={"start": config.start}), form, checkpoint)
    if tokenizer.sha256 != checkpoint.manifest["tokenizer"].get("sha256"):
        hint = "Copy the run's folder again, whole"
        raise CheckpointError(run / FOLDER, "does not have the tokenizer that the checkpoint was trained with", hint)
    if config.task.max_length > body.longest:
        problem = f"{config.task.max_length} tokens are more than the {body.longest} that the model reads"
        raise ConfigError("task.max_length", problem, f"Set it to {body.longest} or less")
    ranks = start_ranks(config.run.model_copy(update={"engine": "torch"}))
    model = form.model(body)
    load_weights(model, checkpoint)
    if config.training.precision == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    encoder = form.encoder(Start(body, tokenizer, {}, None))
    return Finetuned(model.to(ranks.device).eval(), chosen, form, encoder, config, checkpoint, ranks)


def chosen_checkpoint(directory: Path) -> Path:
    """`directory` itself if it is a checkpoint, else the best one of a run by its validation, else its newest."""
    newest = find_checkpoint(directory)
    if newest == directory:
        return directory
    selection = read_manifest(newest).get("state", {}).get("selection")
    best = selection.get("step") if isinstance(selection, dict) else None
    return newest.with_name(f"{best:08d}") if isinstance(best, int) else newest


def _in_place_of(trained: Task, name: str | None) -> list[str]:
    """Overrides that make the configuration one of another task; for `table` they name the classes."""
    if name in (None, trained.name):
        return []
    labels = [f"task.labels={json.dumps(list(trained.classes or ()))}"] if name == "table" else []
    return [f"task.name={json.dumps(name)}", *labels]


def _require_alike(trained: Task, chosen: Task) -> None:
    if chosen.classes != trained.classes:
        known, wanted = (", ".join(task.classes) if task.classes else "a number" for task in (trained, chosen))
        problem = f'"{chosen.name}" has {wanted[:100]}; the model was trained on "{trained.name}", {known[:100]}'
        raise ConfigError("--task", problem, f"Give --task {trained.name}, or another task of the same classes")
    kinds = [(task.form, task.towers, task.vocabulary) for task in (trained, chosen)]
    if kinds[0] != kinds[1]:
        problem = f'"{chosen.name}" has other inputs than "{trained.name}", which the model was trained on'
        raise ConfigError("--task", problem, f"Give --task {trained.name}")
