"""Tasks with one label per example: a class, a number, or one of the example's candidates (WikiHop).

B batch, L length, E width, C classes (1 for a number), K candidates.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.config.finetuning import HeadConfig
from megasparse.errors import ConfigError, DataError
from megasparse.ops.random import RngContext, derive, dropout
from megasparse.tasks.backbones import Backbone
from megasparse.tasks.batches import EncodedExample, Inputs, Padded, Segments, collate
from megasparse.tasks.form import Form
from megasparse.tasks.task import Example

DEVIATION = 0.02  # standard deviation of a new head's weights, as in BERT


@torch.no_grad()
def draw_normal(weight: Tensor, deviation: float, seed: int, *purpose: str) -> None:
    """Fill a weight with normal draws, a pure function of seed and purpose."""
    generator = torch.Generator().manual_seed(derive(seed, *purpose) >> 1)
    weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)


def dropped(x: Tensor, rate: float, rng: RngContext, purpose: str) -> Tensor:
    """Apply dropout to states (B, L, E) in training, with random draws for this purpose."""
    if not rng.training:
        return x
    return dropout(x, rate, rng.key(-1, purpose), rng.rows(x.shape[1], x.device))


def mean_loss(
    scores: Tensor, labels: Tensor | None, rng: RngContext, numbers: bool = False
) -> tuple[Tensor, dict[str, Any]]:
    """Return the mean cross-entropy of scores (B, C), or squared error of numbers (B, 1), 0 without labels (B,). Also
    return the statistics of tasks/form.py except `predicted`, with weight 1 per example, and `accuracy` of classes.
    """
    count, loss, statistics = scores.new_tensor(float(len(scores))), scores.new_zeros(()), {}
    if labels is not None:
        if numbers:
            costs = F.mse_loss(scores.squeeze(1), labels.float(), reduction="none")
        else:
            costs = F.cross_entropy(scores, labels, reduction="none")
            statistics["accuracy"] = (scores.argmax(1) == labels).float().mean()
        loss = costs.mean()
        if not rng.training:
            statistics |= {"costs": costs, "weights": torch.ones_like(costs)}
    return loss, {"tokens": count, "nats": loss.detach() * count, **statistics}


class Head(nn.Module):
    """Classification or regression head: tanh(W·dropout(x)), another dropout and a linear layer, as in RoBERTa. For a
    pair encoded separately, x is [u, v, u·v, u − v] (Long Range Arena, Tay et al. 2021).
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
        """Return the outputs (B, C) fp32. pooled: (B, E) per sequence."""
        x = pooled[0]
        if self.towers:
            u, v = pooled
            x = torch.cat([u, v, u * v, u - v], dim=-1)
        x = x.to(self.dense.weight.dtype).unsqueeze(1)
        x = dropped(x, self.rate_before, rng, "head dropout").squeeze(1)
        x = torch.tanh(self.dense(x)).unsqueeze(1)
        return self.output(dropped(x, self.rate, rng, "second head dropout").squeeze(1)).float()


class TaskModel(nn.Module):
    """Model that predicts a class or a number per example."""

    varying_token_counts = False

    def __init__(self, body: Backbone, outputs: int, config: HeadConfig, towers: bool, seed: int):
        """Build the model with its output layer. outputs: number of classes; 1 to predict a number."""
        super().__init__()
        self.body, self.outputs = body, outputs
        fits = body.pooler is not None and not towers and config.hidden in (0, body.width)
        self.pooling = config.pooling or ("pooler" if fits else "last" if body.causal else "mean")
        self.head = Head(body.width, outputs, config.model_copy(update={"pooling": self.pooling}), towers, seed)
        if self.pooling == "pooler" and body.pooler is not None:
            for parameter, value in zip(self.head.dense.parameters(), body.pooler, strict=True):
                parameter.data.copy_(value)

    def forward(self, inputs: Inputs, rng: RngContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the objective, `mean_loss` plus auxiliary losses, and its statistics. `predicted` is (B, C)."""
        classes = inputs.labels if self.outputs > 1 and rng.training else None
        predicted, auxiliary = self.predicted(inputs, rng, classes)
        loss, statistics = mean_loss(predicted, inputs.labels, rng, numbers=self.outputs == 1)
        if not rng.training:
            statistics["predicted"] = predicted
        return self.body.task_weight * loss + auxiliary, statistics

    def predicted(self, inputs: Inputs, rng: RngContext, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the logits (B, C) fp32, or the numbers, and the auxiliary losses. classes: (B,), for mechanisms."""
        pooled, auxiliary = [], torch.zeros((), device=inputs.sequences[0].tokens.device)
        for read in inputs.sequences:
            states, losses = self.body(read, rng, classes)
            pooled.append(self._pool(states, read))
            auxiliary = auxiliary + losses
        return self.head(pooled, rng), auxiliary

    def _pool(self, states: Tensor, read: Padded) -> Tensor:
        """Pool the states (B, L, E) to (B, E)."""
        if self.pooling in ("first", "pooler"):
            return states[:, 0]
        if self.pooling == "last":
            return states[torch.arange(len(states), device=states.device), read.lengths - 1]
        mask = read.mask
        masked = states if mask is None else torch.where(mask.unsqueeze(-1), states, 0.0)
        return masked.sum(1) / read.lengths.unsqueeze(1)


class LabelForm(Form):
    """Cross-entropy of classes, or squared error of numbers. Answers are class numbers, or numbers."""

    def check(self, body: Backbone) -> None:
        head, hint = self.config.head, 'Set it to "first" or "mean"'
        if head.pooling != "pooler":
            return
        if body.pooler is None:
            raise ConfigError("head.pooling", '"pooler", but the pretrained model has none', hint)
        if self.task.towers or head.hidden not in (0, body.width):
            raise ConfigError("head.pooling", '"pooler" needs head.hidden = 0 and a single sequence', hint)

    @property
    def reads_pooler(self) -> bool:
        return self.config.head.pooling in (None, "pooler") and not self.task.towers and not self.config.head.hidden

    def sketch_labels(self, train: Iterable[Example]) -> int:
        if self.task.classes is not None:
            return len(self.task.classes)
        return max(2, round(max(example.label for example in train if example.label is not None)) + 1)

    def model(self, body: Backbone) -> nn.Module:
        outputs = 1 if self.task.classes is None else len(self.task.classes)
        return TaskModel(body, outputs, self.config.head, self.task.towers, self.config.run.seed)

    def collate(self, examples: Sequence[EncodedExample]) -> Inputs:
        return collate(examples, self.config.task.max_length)

    def answer(self, example: EncodedExample, predicted: np.ndarray) -> int | float:
        """Return the class of highest probability, or the number."""
        return float(predicted[0]) if self.task.classes is None else int(predicted.argmax())

    def row(self, example: EncodedExample, predicted: np.ndarray) -> dict[str, Any]:
        """Return `label` and `predicted`, class names or numbers, and `probabilities` by class, null for numbers."""
        label, answer, classes = example.label, self.answer(example, predicted), self.task.classes
        if classes is None:
            return {"label": label, "predicted": answer, "probabilities": None}
        values = torch.from_numpy(predicted).softmax(0).tolist()
        return {
            "label": None if label is None else classes[label],
            "predicted": classes[int(answer)],
            "probabilities": dict(zip(classes, values, strict=True)),
        }


@dataclass(frozen=True)
class EncodedChoice(EncodedExample):
    marks: np.ndarray  # positions, int64 (K,), of the candidates' scores in the sequence
    candidates: tuple[str, ...]

    def content(self) -> Iterator[bytes]:
        yield from super().content()
        yield self.marks.tobytes()


class ChoiceModel(nn.Module):
    """Model that scores the candidates of a question: w·dropout(h), with h the body's final state at the candidate's
    mark, as in Longformer's WikiHop model (Beltagy et al. 2020). p = softmax of the scores of an example's candidates.
    """

    varying_token_counts = False

    def __init__(self, body: Backbone, rate: float, seed: int):
        """Build the model. rate: dropout probability."""
        super().__init__()
        self.body, self.rate = body, rate
        self.output = nn.Linear(body.width, 1, bias=False)  # a bias does not change a softmax
        draw_normal(self.output.weight, DEVIATION, seed, "initial head", "choice")

    def forward(self, inputs: Inputs, rng: RngContext) -> tuple[Tensor, dict[str, Any]]:
        """Return the objective, `mean_loss` and auxiliary losses, and its statistics. `predicted`: (K,) per example."""
        scores, auxiliary = self.scores(inputs, rng)
        loss, statistics = mean_loss(scores, inputs.labels, rng)
        if not rng.training and inputs.marks is not None:
            counts = (inputs.marks >= 0).sum(1).tolist()
            statistics["predicted"] = [row[:count] for row, count in zip(scores, counts, strict=True)]
        return self.body.task_weight * loss + auxiliary, statistics

    def scores(self, inputs: Inputs, rng: RngContext) -> tuple[Tensor, Tensor]:
        """Return the scores (B, K) fp32, -inf for missing candidates, and the auxiliary losses."""
        states, auxiliary = self.body(inputs.sequences[0], rng, None)
        marks = inputs.marks
        assert marks is not None
        rows = torch.arange(len(states), device=states.device).unsqueeze(1)
        marked = states[rows, marks.clamp(min=0)].to(self.output.weight.dtype)
        scores = self.output(dropped(marked, self.rate, rng, "choice dropout")).squeeze(-1).float()
        return scores.masked_fill(marks < 0, -torch.inf), auxiliary


@dataclass(frozen=True)
class Choice(Example):
    """`inputs`: the question, its candidates, and the texts to read. `label`: number of the right candidate, from 0."""

    candidates: int


class ChoiceForm(Form):
    """Cross-entropy over an example's candidates. Answers are their numbers.

    Inputs are one sequence: [begin] question [separator] candidate [separator] ... candidate [separator] text
    [separator] ..., with type 0 up to the last candidate's separator and 1 after it. The mark of a candidate, the
    position of its score, is the separator after it, so that a decoder has read the candidate. Without special tokens
    the sequence starts with the question, and byte tokenizers use a line end as separator; with other tokenizers there
    are no separators, and the mark is the candidate's last token.

    Only the texts are truncated, at their end, never the question and candidates.
    """

    def check(self, body: Backbone) -> None:
        head, hint = self.config.head, "Remove it: a candidate is scored by one linear layer at its mark"
        for key, value in (("pooling", head.pooling), ("hidden", head.hidden)):
            if value:
                raise ConfigError(f"head.{key}", f"{value!r}, but {self.task.name} does not pool", hint)

    def encoded(self, example: Any) -> EncodedChoice:
        """Encode a Choice. Raises DataError if question and candidates are too long."""
        begin, between, end = self._frame(2)
        separator = end if len(end) else between  # a single one, even if the tokenizer puts two between segments
        ids = [np.concatenate([self._ids(value, example.location), separator]) for value in example.inputs]
        uncut = 1 + example.candidates
        ends = len(begin) + np.cumsum([len(part) for part in ids[:uncut]])
        tokens, first = np.concatenate([begin, *ids]), int(ends[-1])
        limit, location = self.task.config.max_length, example.location
        if first > limit:
            problem = f"question and {example.candidates} candidates of {example.name} have {first:,} tokens"
            hint = "Raise it, or remove the example: they are never truncated"
            raise DataError(str(location), f"{problem}, more than task.max_length = {limit:,}", hint)
        tokens = tokens[:limit] if self.counts.is_cut(len(tokens), location) else tokens
        sequence = Segments(tokens, (np.arange(len(tokens)) >= first).astype(np.int64))
        # Without separators, a candidate without tokens may end before the first token.
        marks, names = np.maximum(ends[1:] - 1, 0), tuple(map(str, example.inputs[1:uncut]))
        return EncodedChoice((sequence,), example.label, location, example.name, marks, names)

    def model(self, body: Backbone) -> ChoiceModel:
        return ChoiceModel(body, self.config.head.dropout, self.config.run.seed)

    def collate(self, examples: Sequence[Any]) -> Inputs:
        marks = np.full((len(examples), max(len(example.marks) for example in examples)), -1)
        for row, example in enumerate(examples):
            marks[row, : len(example.marks)] = example.marks
        return replace(collate(examples, self.config.task.max_length), marks=torch.from_numpy(marks))

    def answer(self, example: EncodedExample, predicted: np.ndarray) -> int:
        """Return the candidate with the highest score, the first of equal ones."""
        return int(predicted.argmax())

    def row(self, example: Any, predicted: np.ndarray) -> dict[str, Any]:
        """Return `label` and `predicted`, texts of candidates, and `scores`, logits by candidate."""
        label, names = example.label, example.candidates
        return {
            "label": None if label is None else names[label],
            "predicted": names[self.answer(example, predicted)],
            "scores": dict(zip(names, predicted.tolist(), strict=True)),
        }
