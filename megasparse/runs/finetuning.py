"""A fine-tuning run, top to bottom: task, pretrained model, engine, validation, loop."""

import time
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from megasparse.config.finetuning import FinetuneConfig
from megasparse.data.batches import Batch
from megasparse.errors import UserError
from megasparse.model.embedding import NgramEmbedding
from megasparse.ops.random import RngContext
from megasparse.planning.dry_run import peak, reset_peak
from megasparse.planning.flops import warn_if_long
from megasparse.tasks.batches import fingerprint
from megasparse.tasks.metrics import LOWER_IS_BETTER
from megasparse.tasks.run import TaskRun, open_run, predict_examples, validation
from megasparse.training.checkpoints.manifest import RunIdentity
from megasparse.training.engines import build_engine
from megasparse.training.loop import train
from megasparse.training.ranks import start_ranks
from megasparse.training.reporting.memory import available_bytes
from megasparse.training.run import Recipe, RunResult, open_training
from megasparse.training.state import Selection
from megasparse.training.stopping.signals import StopSignals

HINT = (
    'Lower training.micro_batch, evaluation.batch or task.max_length, set training.precision="bf16" or '
    'start.activations="checkpoint", or train adapters (lora)'
)


def finetune(
    config: FinetuneConfig,
    *,
    resume: str = "auto",
    allow_changed_config: bool = False,
    stop_at: int | None = None,
    signals: StopSignals | None = None,
) -> RunResult:
    """Fine-tune the pretrained model of `config` on its task and write everything to `config.run.directory`.

    See `pretrain` for arguments, result and errors. A complete run writes `best.json`, which names the checkpoint with
    the best validation metric.

    Examples:
        >>> config = megasparse.load_finetune_config("reviews.json", ["run.directory=runs/reviews_again"])
        >>> megasparse.finetune(config).complete
        True
    """
    ranks = start_ranks(config.run)
    task = open_run(config, ranks.say)
    changes = ["fewer training.epochs", "a smaller task.max_length", "a smaller task.limit"]
    warn_if_long(least_flops(task), task.config.training.precision, changes, ranks)
    config = task.config  # includes numbers that depend on the data
    metric = str(config.evaluation.metric)
    selection = Selection(f"evaluation/{metric}", config.evaluation.patience, lower=metric in LOWER_IS_BETTER)
    recipe = Recipe(
        RunIdentity(config, fingerprint(task.train), task.start.tokenizer.identity),
        make_rng=partial(RngContext, config.run.seed, training=True),
        build_model=lambda: task.model,
        open_data=lambda position, hooks: task.batches(ranks, position),
        build_evaluation=lambda engine, hooks: validation(task, engine, hooks),
        selection=selection,
    )
    with open_training(recipe, ranks, resume, allow_changed_config, stop_at, signals) as run:
        if ranks.rank == 0:
            task.start.write(Path(config.run.directory))
        result = train(run)
        if result.complete and ranks.rank == 0:
            selection.write(result.directory / "best.json")
    ranks.stop()
    return result


def least_flops(task: TaskRun) -> float:
    """Return FLOPs of products with weights over all steps, forward and backward, as if all weights were trained."""
    training = task.config.training
    modules = list(task.model.modules())
    embedded = {id(module.weight) for module in modules if isinstance(module, torch.nn.Embedding)}
    embedded |= {id(table) for module in modules if isinstance(module, NgramEmbedding) for table in module.tables}
    weights = sum(p.numel() for p in task.model.parameters() if p.dim() > 1 and id(p) not in embedded)
    tokens = float(training.steps * training.global_batch)
    if training.batch_unit == "examples":
        sample = list(islice(task.train, 1000))
        tokens *= sum(example.length for example in sample) / len(sample)
    return 6.0 * weights * tokens


def finetune_dry_run(config: FinetuneConfig) -> str:
    """Run one step and one validation batch of the longest examples on plain torch, and return a report."""
    run = config.run.changed(engine="torch")
    ranks = start_ranks(run)
    task = open_run(config, ranks.say)
    training, seed, weights = task.config.training, config.run.seed, list(task.model.parameters())
    weight_bytes, before = sum(weight.nbytes for weight in weights), reset_peak(ranks.device)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    length = max(example.length for example in task.train)
    size = training.micro_batch if training.batch_unit == "examples" else max(1, training.micro_batch // length)
    longest = sorted(task.train, key=lambda example: -example.length)[:size]
    settings = task.config.changed(run=run, training={"global_batch": size, "micro_batch": size})
    started = time.perf_counter()
    try:
        engine = build_engine(task.model.train(), settings, partial(RngContext, seed, training=True), ranks)
        loss = engine.train_step([Batch(task.form.collate(longest), torch.arange(size))], 0, 1e-9).loss
        seconds = time.perf_counter() - started
        scored = sorted(task.validation, key=lambda example: -example.length)[: config.evaluation.batch]
        predict_examples(engine.evaluate, task.form, scored, settings, ranks)
    except torch.OutOfMemoryError as error:
        raise UserError(f"a step of {size} × {length:,} tokens does not fit into memory ({error}). {HINT}") from None
    used, free = peak(ranks.device) - before + weight_bytes, available_bytes(ranks.device)
    lines = {
        "parameters": f"{trained:,} trained, {sum(weight.numel() for weight in weights) - trained:,} frozen",
        "steps": f"{training.steps:,}, of {training.global_batch} {training.batch_unit}",
        "micro-batch": f"{size} × {length:,} tokens in {training.precision} on {ranks.device}: {seconds:.1f} s",
        "peak memory": f"{used / 1e9:.2f} GB measured, in one process without ZeRO; {free / 1e9:.2f} GB available",
        "loss": f"{loss:.3f}, untrained",
    }
    engine.close()
    return "\n".join(f"{name:16} {value}" for name, value in lines.items())
