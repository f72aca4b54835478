"""A fine-tuning run, top to bottom: task, pretrained model, memory check, engine, validation, loop."""

import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from megasparse.config.finetuning import FinetuneConfig
from megasparse.ops.random import RngContext
from megasparse.planning.flops import warn_if_long
from megasparse.planning.states import require_fit
from megasparse.tasks.batches import fingerprint
from megasparse.tasks.evaluate import selection_of, validation
from megasparse.tasks.memory_check import HINT, predict
from megasparse.tasks.run import TaskRun, open_run
from megasparse.training.checkpoints.manifest import RunIdentity
from megasparse.training.loop import train
from megasparse.training.ranks import Ranks, start_ranks
from megasparse.training.run import Recipe, RunResult, open_training
from megasparse.training.stopping.signals import StopSignals


def finetune(
    config: FinetuneConfig,
    *,
    resume: str = "auto",
    allow_changed_config: bool = False,
    stop_at: int | None = None,
    signals: StopSignals | None = None,
) -> RunResult:
    """Fine-tune the pretrained model of `config` on its task and write everything to `config.run.directory`.

    Arguments and errors are those of `pretrain`. A complete run writes `best.json`, which names the checkpoint with the
    best validation metric.

    Examples:
        >>> config = megasparse.load_finetune_config("reviews.json", ["run.directory=runs/reviews_again"])
        >>> megasparse.finetune(config).complete
        True
    """
    ranks = start_ranks(config.run)
    say = _reporter(ranks)
    task = open_run(config, say)
    require_fit(predict(task, ranks).pools, ranks, HINT, say)
    changes = ["fewer training.epochs", "a smaller task.max_length", "a smaller task.limit"]
    warn_if_long(least_flops(task), task.config.training.precision, changes, ranks)
    config = task.config  # with the numbers that depend on the data filled in
    selection = selection_of(config)

    tokenizer = {"name": task.start.tokenizer.name, "sha256": task.start.tokenizer.sha256}
    recipe = Recipe(
        RunIdentity(config, fingerprint(task.train), tokenizer),
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
    """FLOPs of all steps in products of weights alone, forward and backward, as `model_flops_per_token` counts them;
    those of adapters and frozen weights as if all were trained.
    """
    training = task.config.training
    embedded = {id(module.weight) for module in task.model.modules() if isinstance(module, torch.nn.Embedding)}
    weights = sum(p.numel() for p in task.model.parameters() if p.dim() > 1 and id(p) not in embedded)
    tokens = float(training.steps * training.global_batch)
    if training.batch_unit == "examples":
        sample = list(islice(task.train, 1000))
        tokens *= sum(example.length for example in sample) / len(sample)
    return 6.0 * weights * tokens


def finetune_dry_run(config: FinetuneConfig) -> str:
    """Predict the memory that `finetune` takes at its peak, and report it. Writes nothing."""
    ranks = start_ranks(config.run)
    return predict(open_run(config, _reporter(ranks)), ranks).lines()


def _reporter(ranks: Ranks) -> Callable[[str], None]:
    """Return a function that prints a line to stderr on rank 0, and nothing on other ranks."""
    return lambda line: print(line, file=sys.stderr) if ranks.rank == 0 else None
