"""Predictions of a model for examples, and the validation that scores them. N examples."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from megasparse.config.finetuning import FinetuneConfig
from megasparse.ops.random import EVALUATION_STEP, RngContext
from megasparse.tasks.encoding import Encoded
from megasparse.tasks.form import Form
from megasparse.tasks.metrics import LOWER_IS_BETTER
from megasparse.tasks.run import TaskRun
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks
from megasparse.training.run import Evaluate
from megasparse.training.selection import Selection
from megasparse.training.stopping.hooks import RunHooks, check_stop

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
