"""Tasks whose examples have a label: a class, or a number. B batch, L length, E width, C classes (1 for a number)."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.config.finetuning import HeadConfig
from megasparse.errors import ConfigError
from megasparse.ops.random import RngContext, derive, dropout
from megasparse.tasks.backbones import Backbone
from megasparse.tasks.batches import (
    Encoded,
    Encoder,
    Inputs,
    Padded,
    collate,
    dummy_tokens,
    require_vocabulary,
    separators_of,
)
from megasparse.tasks.form import Form
from megasparse.tasks.task import Example, SourceLocation

DEVIATION = 0.02
"""Standard deviation of a new head's weights, as in BERT."""


@torch.no_grad()
def draw_normal(weight: Tensor, deviation: float, seed: int, *purpose: str) -> None:
    """Fill a weight with normal draws: a pure function of seed and purpose."""
    generator = torch.Generator().manual_seed(derive(seed, *purpose) >> 1)
    weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)


def mean_of(costs: Tensor | None, predicted: Tensor, rng: RngContext) -> tuple[Tensor, dict[str, Any]]:
    """The mean of the examples' costs (B,), 0 where there are none; and the statistics of tasks/form.py but for
    `predicted`, an example weighing 1.
    """
    count = torch.tensor(float(len(predicted)), device=predicted.device)
    loss = torch.zeros((), device=predicted.device) if costs is None else costs.mean()
    found = {"tokens": count, "nats": loss.detach() * count}
    if costs is not None and not rng.training:
        found |= {"costs": costs, "weights": torch.ones_like(costs)}
    return loss, found


class Head(nn.Module):
    """Classification or regression head: tanh(W·dropout(x)) and a linear layer after another dropout, as RoBERTa's; of
    a pair read apart x is [u, v, u·v, u − v] (Long Range Arena's, Tay et al. 2021).
    """

    def __init__(self, width: int, outputs: int, config: HeadConfig, towers: bool, seed: int):
        super().__init__()
        width_in, hidden = width * (4 if towers else 1), config.hidden or width
        self.rate, self.towers = config.dropout, towers
        self.rate_before = 0.0 if config.pooling == "pooler" else config.dropout
        self.dense, self.output = nn.Linear(width_in, hidden), nn.Linear(hidden, outputs)
        for name, layer in (("dense", self.dense), ("output", self.output)):
            draw_normal(layer.weight, DEVIATION, seed, "initial head", name)
            nn.init.zeros_(layer.bias)

    def forward(self, pooled: list[Tensor], rng: RngContext) -> Tensor:
        """The outputs (B, C) fp32. pooled: (B, E) of each sequence."""
        x = pooled[0]
        if self.towers:
            u, v = pooled
            x = torch.cat([u, v, u * v, u - v], dim=-1)
        x = self._dropped(x.to(self.dense.weight.dtype), self.rate_before, rng, "head dropout")
        x = self._dropped(torch.tanh(self.dense(x)), self.rate, rng, "second head dropout")
        return self.output(x).float()

    @staticmethod
    def _dropped(x: Tensor, rate: float, rng: RngContext, purpose: str) -> Tensor:
        if not rng.training:
            return x
        return dropout(x.unsqueeze(1), rate, rng.key(-1, purpose), rng.rows(1, x.device)).squeeze(1)


class TaskModel(nn.Module):
    """Model that predicts each example's class, or its number."""

    varying_token_counts = False

    def __init__(self, body: Backbone, outputs: int, config: HeadConfig, towers: bool, seed: int):
        """Make the model with its output layer. outputs: number of classes; 1 to predict a number."""
        super().__init__()
        self.body, self.outputs = body, outputs
        fits = body.pooler is not None and not towers and config.hidden in (0, body.width)
        own = "pooler" if fits else "last" if body.causal else "mean"
        self.pooling = config.pooling or own
        self.head = Head(body.width, outputs, config.model_copy(update={"pooling": self.pooling}), towers, seed)
        if self.pooling == "pooler" and body.pooler is not None:
            for parameter, value in zip(self.head.dense.parameters(), body.pooler, strict=True):
                parameter.data.copy_(value)

    def forward(self, inputs: Inputs, rng: RngContext) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective, mean cross-entropy of an example in nats or mean squared error, plus auxiliary losses; and the
        statistics of tasks/form.py, an example weighing 1, and `accuracy` of classes. `predicted` is (B, C). Without
        labels the loss is 0.
        """
        classes = inputs.labels if self.outputs > 1 and rng.training else None
        predicted, auxiliary = self.predicted(inputs, rng, classes)
        costs = None
        if inputs.labels is not None and self.outputs == 1:
            costs = F.mse_loss(predicted.squeeze(1), inputs.labels.float(), reduction="none")
        elif inputs.labels is not None:
            costs = F.cross_entropy(predicted, inputs.labels, reduction="none")
        loss, found = mean_of(costs, predicted, rng)
        if inputs.labels is not None and self.outputs > 1:
            found["accuracy"] = (predicted.argmax(1) == inputs.labels).float().mean()
        if not rng.training:
            found["predicted"] = predicted
        weight: Any = self.body.task_weight
        return weight * loss + auxiliary, found

    def predicted(self, inputs: Inputs, rng: RngContext, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The logits (B, C) fp32, or the numbers; and the auxiliary losses. classes: (B,), for the mechanisms."""
        pooled, auxiliary = [], torch.zeros((), device=inputs.sequences[0].tokens.device)
        for read in inputs.sequences:
            states, own = self.body(read, rng, classes)
            pooled.append(self._pool(states, read))
            auxiliary = auxiliary + own
        return self.head(pooled, rng), auxiliary

    def _pool(self, states: Tensor, read: Padded) -> Tensor:
        """Pool the states (B, L, E) to (B, E)."""
        rows = torch.arange(len(states), device=states.device)
        if self.pooling in ("first", "pooler"):
            return states[:, 0]
        if self.pooling == "last":
            return states[rows, read.lengths - 1]
        mask = read.mask
        kept = states if mask is None else torch.where(mask.unsqueeze(-1), states, 0.0)
        return kept.sum(1) / read.lengths.unsqueeze(1)


class LabelForm(Form):
    """Cross-entropy of the class, or squared error of the number; answers are class numbers, or numbers."""

    def check(self, body: Backbone) -> None:
        head, hint = self.config.head, 'Set it to "first" or "mean"'
        if head.pooling != "pooler":
            return
        if body.pooler is None:
            raise ConfigError("head.pooling", '"pooler", and the pretrained model has none', hint)
        if self.task.towers or head.hidden not in (0, body.width):
            raise ConfigError("head.pooling", '"pooler" is as wide as the model, and of one sequence', hint)

    @property
    def reads_pooler(self) -> bool:
        return self.config.head.pooling in (None, "pooler") and not self.task.towers and not self.config.head.hidden

    def sketch_labels(self, train: Iterable[Example]) -> int:
        if self.task.classes is not None:
            return len(self.task.classes)
        return max(2, round(max(example.label for example in train if example.label is not None)) + 1)

    def encoder(self, start: Any) -> Encoder:
        task, body = self.task, start.body
        tokenizer = None if task.vocabulary is not None else start.tokenizer
        require_vocabulary(body, task.vocabulary or start.tokenizer.vocabulary, task.name if task.vocabulary else None)
        return Encoder(task, tokenizer, body.vocabulary, separators=separators_of(body))

    def model(self, body: Backbone) -> nn.Module:
        outputs = 1 if self.task.classes is None else len(self.task.classes)
        return TaskModel(body, outputs, self.config.head, self.task.towers, self.config.run.seed)

    def collate(self, examples: Sequence[Encoded]) -> Inputs:
        return collate(examples, self.config.task.max_length)

    def dummy_batch(self, body: Backbone, batch: int, length: int) -> Inputs:
        """Random tokens, and labels of class 0."""
        read = dummy_tokens(body.vocabulary, batch, length)
        labels = torch.zeros(batch, dtype=torch.float32 if self.task.classes is None else torch.int64)
        return Inputs((read,) * (2 if self.task.towers else 1), labels)

    def answer(self, example: Encoded, predicted: np.ndarray) -> int | float:
        """The class of highest probability, or the number."""
        return float(predicted[0]) if self.task.classes is None else int(predicted.argmax())

    def row(self, example: Encoded, predicted: np.ndarray) -> dict[str, Any]:
        """`label` and `predicted` are names of classes, or numbers; `probabilities` by class, null for numbers."""
        label, own, classes = example.label, self.answer(example, predicted), self.task.classes
        if classes is None:
            return {"label": label, "predicted": own, "probabilities": None}
        values = torch.from_numpy(predicted).softmax(0).tolist()
        return {
            "label": None if label is None else classes[label],
            "predicted": classes[int(own)],
            "probabilities": dict(zip(classes, values, strict=True)),
        }

    def example(self, texts: Sequence[str]) -> Example:
        task, wanted = self.task, self.task.segments
        if task.vocabulary is not None:
            return super().example(texts)
        if len(texts) != wanted:
            problem = f'{len(texts)} given, and an example of "{task.name}" has {wanted}'
            raise ConfigError("--text", problem, f"Give it {'twice' if wanted == 2 else 'once'}")
        return Example(tuple(texts), None, SourceLocation(Path("--text")), "0")
