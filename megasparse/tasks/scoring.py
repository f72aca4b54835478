"""What a model tells of examples, and how good that is. N examples, C classes, or 1 where a number is told."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from megasparse.config.finetuning import FinetuneConfig
from megasparse.ops.random import EVALUATION_STEP, Draws
from megasparse.tasks.batches import collate
from megasparse.tasks.encoding import Encoded
from megasparse.tasks.metrics import METRICS
from megasparse.tasks.run import TaskRun
from megasparse.tasks.task import Task
from megasparse.training.engine import Engine
from megasparse.training.loop import Evaluate
from megasparse.training.ranks import Ranks
from megasparse.training.watch import Watch, heed

Score = Callable[[Any, Draws], tuple[Any, dict[str, Any]]]
"""A TaskModel in evaluation, or an engine around one: (inputs, draws) -> (objective, statistics with `told`)."""


def tell(
    score: Score,
    examples: Sequence[Encoded],
    config: FinetuneConfig,
    ranks: Ranks,
    pause: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Unnormalised log-probabilities of each example's classes, or its number: (N, C) float64, on every rank.

    The ranks share the batches out among them; every one scores equally many. What an example is told depends neither
    on the batch nor on the rank that it is in. pause: called before each batch.
    """
    order = sorted(range(len(examples)), key=lambda i: -max(len(each.tokens) for each in examples[i].sequences))
    size = config.evaluation.batch
    batches = [order[first : first + size] for first in range(0, len(order), size)]
    batches += batches[:1] * (-len(batches) % ranks.world_size)
    found: dict[int, list[float]] = {}
    for numbers in batches[ranks.rank :: ranks.world_size]:
        pause()
        inputs = collate([examples[i] for i in numbers], config.task.max_length).to(ranks.device)
        draws = Draws(config.run.seed, EVALUATION_STEP, torch.tensor(numbers), training=False)
        told = score(inputs, draws)[1]["told"]
        found |= dict(zip(numbers, told.double().tolist(), strict=True))
    shares = ranks.gather([[number, *values] for number, values in found.items()])
    table = {int(row[0]): row[1:] for share in shares for row in share}
    return np.array([table[i] for i in range(len(examples))], dtype=np.float64)


def answers(task: Task, told: np.ndarray) -> np.ndarray:
    """The classes (N,) of highest probability, or the numbers."""
    return told[:, 0] if task.classes is None else told.argmax(axis=1)


def measures(task: Task, examples: Sequence[Encoded], told: np.ndarray) -> dict[str, float]:
    """The task's metrics, by name."""
    labels, own = np.array([example.label for example in examples]), answers(task, told)
    return {name: METRICS[name](labels, own) for name in task.metrics}


def validation(run: TaskRun, engine: Engine, watch: Watch) -> Evaluate:
    """What the training loop calls after every step: where a validation is due, evaluation/loss (nats, or squared
    error, an example) and evaluation/METRIC of each of the task's. Raises StopWanted as `heed` does.
    """
    config, every, steps = run.config, run.config.evaluation.every, run.config.training.steps
    examples, model = run.validation, engine.module
    labels = torch.tensor([example.label for example in examples])

    def validate(step: int) -> dict[str, float]:
        if step % every and step != steps:
            return {}
        model.eval()
        try:
            pause = lambda: heed(watch, engine.ranks, "validation")  # noqa: E731
            told = tell(engine.evaluate, examples, config, engine.ranks, pause)
        finally:
            model.train()
        found = {f"evaluation/{name}": value for name, value in measures(run.task, examples, told).items()}
        return {"evaluation/loss": _loss(torch.from_numpy(told), labels), **found}

    return validate


def _loss(told: torch.Tensor, labels: torch.Tensor) -> float:
    if told.shape[1] == 1:
        return torch.nn.functional.mse_loss(told[:, 0], labels.double()).item()
    return torch.nn.functional.cross_entropy(told, labels).item()
