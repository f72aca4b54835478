"""Common interface of all tasks of a form: encoding, batches, model, answers and metrics; and the forms with one label
per example: a class, a number, or one of the example's candidates (WikiHop).

N examples, B of them in a batch, L length, E width, C classes (1 for a number), K candidates.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.config.finetuning import FinetuneConfig, HeadConfig
from megasparse.config.schema import ModelConfig
from megasparse.data.tokenizers import Tokenizer
from megasparse.errors import ConfigError, DataError
from megasparse.ops.random import RngContext, derive, dropout
from megasparse.tasks.batches import EncodedExample, ExampleCounts, Inputs, Padded, Segments, collate, side_by_side
from megasparse.tasks.body import Backbone, MegasparseBody
from megasparse.tasks.metrics import METRICS
from megasparse.tasks.task import Example, Input, SourceLocation, Task

LINE_END = 10  # byte between two segments, for models without a separator
DEVIATION = 0.02  # standard deviation of a new head's weights, as in BERT


@torch.no_grad()
def draw_normal(weight: Tensor, deviation: float, seed: int, *purpose: str) -> None:
    """Fill a weight with normal draws, a pure function of seed and purpose."""
    generator = torch.Generator().manual_seed(derive(seed, *purpose) >> 1)
    weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)


def dropped(x: Tensor, rate: float, rng: RngContext, purpose: str) -> Tensor:
    """Apply dropout to states (B, L, E) in training, with random draws for this purpose."""
    return dropout(x, rate, rng.key(-1, purpose), rng.rows(x.shape[1], x.device)) if rng.training else x


class Form(ABC):
    """Base class of the forms of tasks, selected by a task's `form`.

    Inputs are encoded in the format of pretrained models: [begin] A [separator], or [begin] A [separator] B
    [separator], if the tokenizer has these tokens; else A, or A, a line end and B.
    """

    two_sided: ClassVar[bool] = False  # True if the model is an encoder–decoder, False if it is one stack
    pooled_sketch: ClassVar[bool] = True  # True if a Smart Bird sketch learns a class per sequence, else tokens

    def __init__(self, task: Task, config: FinetuneConfig):
        self.task, self.config = task, config
        self.tokenizer: Any = None  # tokenizer of the pretrained model; None if the task's inputs are ids

    def body(self, model: ModelConfig) -> Backbone:
        """Build a megasparse body without filled weights."""
        return MegasparseBody(model)

    def check(self, body: Backbone) -> None:  # noqa: B027
        """Raise ConfigError if settings of the run are incompatible with the body."""

    @property
    def reads_pooler(self) -> bool:
        """True if the task's model uses the pretrained pooler of a body, if there is one."""
        head = self.config.head
        return (
            self.task.form == "labels" and not self.task.towers and head.pooling in (None, "pooler") and not head.hidden
        )

    def sketch_labels(self, train: Iterable[Example]) -> int:
        """Return the number of classes per sequence that a Smart Bird sketch learns."""
        if self.task.classes is not None or self.task.form != "labels":
            return len(self.task.classes or (0, 1))
        return max(2, round(max(example.label for example in train if example.label is not None)) + 1)

    def prepare(self, body: Backbone, tokenizer: Tokenizer) -> None:
        """Prepare the encoding of examples for a pretrained body. Special tokens beyond its vocabulary are omitted.
        Raises ConfigError if body and tokenizer are incompatible with the task.
        """
        ids = self.task.vocabulary
        require_vocabulary(body, ids or tokenizer.vocabulary, self.task.name if ids else None)
        self.tokenizer, special = (tokenizer, tokenizer.special) if ids is None else (None, None)
        fits = special is not None and max(special.begin, special.separator) < body.vocabulary
        self.special, self.separators = special if fits else None, body.separators

    def reset(self) -> None:
        """Start the counts of a split's examples."""
        self.counts = ExampleCounts(self.task.config, limit=self.task.config.max_length)

    def encode(self, examples: Iterable[Example]) -> Iterator[EncodedExample]:
        """Encode the examples of a split, and count them in `counts`. Raises DataError naming the location of an empty
        or too long input, if the configuration forbids these.
        """
        self.reset()
        for example in examples:
            self.counts.examples += 1
            yield self.encoded(example)

    def encoded(self, example: Example) -> EncodedExample:
        if self.task.classes is not None and example.label is not None:
            name = self.task.classes[int(example.label)]
            self.counts.kinds[name] = self.counts.kinds.get(name, 0) + 1
        groups = [(value,) for value in example.inputs] if self.task.towers else [example.inputs]
        sequences = tuple(self._join(group, example.location) for group in groups)
        return EncodedExample(sequences, example.label, example.location, example.name)

    def lines(self, split: str) -> list[str]:
        """Return the lines to print about the split encoded last."""
        counts = self.counts
        several = f"{counts.examples:,} examples, the longest"
        title = f"{split}: {'1 example' if counts.examples == 1 else several} of {counts.longest:,} tokens"
        if counts.kinds:
            title += "; " + ", ".join(f"{name}: {count:,}" for name, count in sorted(counts.kinds.items()))
        return [title, *counts.notes(split)]

    def _join(self, inputs: tuple[Input, ...], location: SourceLocation) -> Segments:
        parts = [self._ids(value, location) for value in inputs]
        frame = self.frame(len(parts))
        special = sum(map(len, frame))
        if self.counts.is_cut(sum(map(len, parts)) + special, location):
            room = self.task.config.max_length - special
            if room < len(parts):
                problem = f"{self.task.config.max_length} leaves no space for text next to {special} special tokens"
                raise ConfigError("task.max_length", problem, "Raise it")
            parts = cut(parts, room)
        ends = (piece for pair in zip(parts, frame[1:], strict=True) for piece in pair)
        return segments(np.concatenate([frame[0], *ends]), sum(map(len, (*frame[:2], parts[0]))))

    def frame(self, segments: int) -> list[np.ndarray]:
        """Return the special tokens before, between and after the segments."""
        if self.special is None:
            between = [LINE_END] if self.tokenizer is not None and self.tokenizer.name == "bytes" else []
            ids: list[list[int]] = [[], *[between] * (segments - 1), []]
        else:
            separator = [self.special.separator]
            ids = [[self.special.begin], *[separator * self.separators] * (segments - 1), separator]
        return [np.array(tokens, dtype=np.int64) for tokens in ids]

    def _ids(self, value: Input, location: SourceLocation) -> np.ndarray:
        tokens: np.ndarray = self.tokenizer.encode(value).numpy() if isinstance(value, str) else value
        if not len(tokens):
            self.counts.count_empty("empty: the model has nothing to read", location)
        return tokens

    @abstractmethod
    def model(self, body: Backbone) -> nn.Module:
        """Build the task's model around a pretrained body, its attribute `body`.

        Called with a batch and a RngContext, the model returns the objective and statistics:

        nats, tokens: sums of the examples' costs and weights; their quotient is the loss. In evaluation also
        `predicted`, one tensor for each of the B examples, the input of `answer`, and with labels `costs` and
        `weights`, (B,) each. All others are averaged and logged.
        If `varying_token_counts` is True, the sum of weights differs between batches; the model then has
        `count_scored(batch)`, which returns it, and an argument `divisor` that replaces it, as pretrained models have.
        """

    @abstractmethod
    def collate(self, examples: Sequence[Any]) -> Any:
        """Return a batch with `to(device)` and `numel()`, its number of tokens."""

    @abstractmethod
    def answer(self, example: Any, predicted: np.ndarray) -> Any:
        """Return the answer that metrics compare with `label`. predicted: the model's output, flat float64."""

    def row(self, example: Any, predicted: np.ndarray) -> dict[str, Any]:
        """Return a prediction as JSON: `label` or null, `predicted`, and fields of the form."""
        return {"label": example.label, "predicted": self.answer(example, predicted)}

    def example(self, texts: Sequence[str]) -> Example:
        """Build an example from command-line texts. Raises ConfigError if the task has other inputs."""
        if self.task.form not in ("labels", "texts") or self.task.vocabulary is not None:
            raise ConfigError("--text", f'"{self.task.name}" does not read texts', "Use --source FILE")
        if len(texts) != self.task.segments:
            problem = f'{len(texts)} given, but an example of "{self.task.name}" needs {self.task.segments}'
            raise ConfigError("--text", problem, f"Use it {'twice' if self.task.segments == 2 else 'once'}")
        return Example(tuple(texts), None, SourceLocation(Path("--text")), "0")

    def measures(self, examples: Sequence[EncodedExample], answers: Sequence[Any]) -> dict[str, float]:
        """Return the task's metrics, by name."""
        labels = column([example.label for example in examples])
        return {name: METRICS[name](labels, column(answers)) for name in self.task.metrics}


def segments(tokens: np.ndarray, first: int) -> Segments:
    """Return a sequence whose second segment starts at a position."""
    return Segments(tokens, (np.arange(len(tokens)) >= first).astype(np.int64))


def column(values: Sequence[Any]) -> np.ndarray:
    """Return the values as an array (N,): numbers, or objects for other types."""
    if all(isinstance(value, int | float | np.number) for value in values):
        return np.array(values)
    return np.fromiter(values, dtype=object, count=len(values))  # np.array would unpack arrays of one shape


def cut(parts: list[np.ndarray], room: int) -> list[np.ndarray]:
    """Truncate the parts to `room` tokens in total, longest first, as Hugging Face's tokenizers do: the shorter of two
    keeps up to half of the room; of equal parts the second is cut.
    """
    if len(parts) == 1:
        return [parts[0][:room]]
    short, long = sorted((0, 1), key=lambda index: len(parts[index]))
    lengths = {short: min(len(parts[short]), room // 2)}
    lengths[long] = room - lengths[short]
    return [parts[index][: lengths[index]] for index in (0, 1)]


def require_vocabulary(body: Any, needed: int, task: str | None = None) -> None:
    """Raise ConfigError if a body lacks embeddings for ids of a task or its tokenizer."""
    if needed > body.vocabulary:
        problem = f"{body.vocabulary} ids, but {task or 'its tokenizer'} has {needed}"
        raise ConfigError("model.vocabulary", problem, f"Set it to {needed} or more")


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
        x = dropped(x.to(self.dense.weight.dtype).unsqueeze(1), self.rate_before, rng, "head dropout").squeeze(1)
        x = torch.tanh(self.dense(x)).unsqueeze(1)
        return self.output(dropped(x, self.rate, rng, "second head dropout").squeeze(1)).float()


class TaskModel(nn.Module):
    """Model that predicts a class or a number per example. outputs: number of classes; 1 to predict a number."""

    varying_token_counts = False

    def __init__(self, body: Backbone, outputs: int, config: HeadConfig, towers: bool, seed: int):
        super().__init__()
        self.body, self.outputs = body, outputs
        fits = body.pooler is not None and not towers and config.hidden in (0, body.width)
        self.pooling = config.pooling or ("pooler" if fits else "last" if body.causal else "mean")
        self.head = Head(body.width, outputs, config.changed(pooling=self.pooling), towers, seed)
        if self.pooling == "pooler" and body.pooler is not None:
            for parameter, value in zip(self.head.dense.parameters(), body.pooler, strict=True):
                parameter.data.copy_(value)

    def forward(self, inputs: Inputs, rng: RngContext) -> tuple[Tensor, dict[str, Any]]:
        """Return the objective, the mean cross-entropy or squared error plus auxiliary losses, and the statistics of
        `Form.model`, with weight 1 per example, and `accuracy` of classes. Without labels the loss is 0.
        """
        labels, classes = inputs.labels, inputs.labels if self.outputs > 1 and rng.training else None
        scores, auxiliary = self.predicted(inputs, rng, classes)
        count, loss, statistics = scores.new_tensor(float(len(scores))), scores.new_zeros(()), dict[str, Any]()
        if labels is not None:
            if self.outputs == 1:
                costs = F.mse_loss(scores.squeeze(1), labels.float(), reduction="none")
            else:
                costs = F.cross_entropy(scores, labels, reduction="none")
                statistics["accuracy"] = (scores.argmax(1) == labels).float().mean()
            loss = costs.mean()
            statistics |= {} if rng.training else {"costs": costs, "weights": torch.ones_like(costs)}
        if not rng.training:
            statistics["predicted"] = scores
            if inputs.marks is not None:
                counts = (inputs.marks >= 0).sum(1).tolist()
                statistics["predicted"] = [row[:count] for row, count in zip(scores, counts, strict=True)]
        statistics |= {"tokens": count, "nats": loss.detach() * count}
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
        if self.pooling in ("first", "pooler"):
            return states[:, 0]
        if self.pooling == "last":
            return states[torch.arange(len(states), device=states.device), read.lengths - 1]
        mask = read.mask
        masked = states if mask is None else torch.where(mask.unsqueeze(-1), states, 0.0)
        return masked.sum(1) / read.lengths.unsqueeze(1)


class LabelForm(Form):
    """Cross-entropy of classes, or squared error of numbers."""

    def check(self, body: Backbone) -> None:
        head, hint = self.config.head, 'Set it to "first" or "mean"'
        if head.pooling == "pooler" and body.pooler is None:
            raise ConfigError("head.pooling", '"pooler", but the pretrained model has none', hint)
        if head.pooling == "pooler" and (self.task.towers or head.hidden not in (0, body.width)):
            raise ConfigError("head.pooling", '"pooler" needs head.hidden = 0 and a single sequence', hint)

    def model(self, body: Backbone) -> nn.Module:
        outputs = 1 if self.task.classes is None else len(self.task.classes)
        return TaskModel(body, outputs, self.config.head, self.task.towers, self.config.run.seed)

    def collate(self, examples: Sequence[EncodedExample]) -> Inputs:
        return collate(examples, self.config.task.max_length)

    def answer(self, example: EncodedExample, predicted: np.ndarray) -> int | float:
        numbers = self.task.classes is None and not example.candidates
        return float(predicted[0]) if numbers else int(predicted.argmax())

    def row(self, example: EncodedExample, predicted: np.ndarray) -> dict[str, Any]:
        """Return `label` and `predicted`, names or numbers; `probabilities` by class, null for numbers, or `scores`,
        logits by candidate.
        """
        label, answer, names = example.label, self.answer(example, predicted), example.candidates or self.task.classes
        if names is None:
            return {"label": label, "predicted": answer, "probabilities": None}
        row = {"label": None if label is None else names[label], "predicted": names[int(answer)]}
        kind = "scores" if example.candidates else "probabilities"
        values = predicted if example.candidates else torch.from_numpy(predicted).softmax(0)
        return {**row, kind: dict(zip(names, values.tolist(), strict=True))}


class ChoiceModel(TaskModel):
    """Model that scores the candidates of a question: w·dropout(h), with h the body's final state at the candidate's
    mark, as in Longformer's WikiHop model (Beltagy et al. 2020). p = softmax of the scores of an example's candidates.
    """

    def __init__(self, body: Backbone, rate: float, seed: int):
        nn.Module.__init__(self)
        self.body, self.rate, self.outputs = body, rate, 2
        self.output = nn.Linear(body.width, 1, bias=False)  # a bias does not change a softmax
        draw_normal(self.output.weight, DEVIATION, seed, "initial head", "choice")

    def predicted(self, inputs: Inputs, rng: RngContext, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the scores (B, K) fp32, -inf for missing candidates, and the auxiliary losses."""
        states, auxiliary = self.body(inputs.sequences[0], rng, None)
        marks: Any = inputs.marks
        rows = torch.arange(len(states), device=states.device).unsqueeze(1)
        marked = states[rows, marks.clamp(min=0)].to(self.output.weight.dtype)
        scores = self.output(dropped(marked, self.rate, rng, "choice dropout")).squeeze(-1).float()
        return scores.masked_fill(marks < 0, -torch.inf), auxiliary


class ChoiceForm(LabelForm):
    """Cross-entropy over an example's candidates. Inputs are the question, the candidates and the texts to read;
    answers are the numbers of candidates, the first of equal scores.

    The sequence is [begin] question [separator] candidate [separator] ... candidate [separator] text [separator] ...,
    with type 0 up to the last candidate's separator and 1 after it. The mark of a candidate, the position of its score,
    is the separator after it, so that a decoder has read the candidate. Without special tokens the sequence starts with
    the question, and byte tokenizers use a line end as separator; with other tokenizers there are no separators, and
    the mark is the candidate's last token. Only the texts are truncated.
    """

    def check(self, body: Backbone) -> None:
        head, hint = self.config.head, "Remove it: a candidate is scored by one linear layer at its mark"
        for key, value in (("pooling", head.pooling), ("hidden", head.hidden)):
            if value:
                raise ConfigError(f"head.{key}", f"{value!r}, but {self.task.name} does not pool", hint)

    def encoded(self, example: Example) -> EncodedExample:
        question, candidates, texts = example.inputs
        begin, between, end = self.frame(2)
        separator = end if len(end) else between  # a single one, even if the tokenizer puts two between segments
        parts = (question, *candidates, *texts)
        ids = [np.concatenate([self._ids(value, example.location), separator]) for value in parts]
        ends = len(begin) + np.cumsum([len(part) for part in ids[: 1 + len(candidates)]])
        tokens, first = np.concatenate([begin, *ids]), int(ends[-1])
        limit, location = self.task.config.max_length, example.location
        if first > limit:
            problem = f"question and {len(candidates)} candidates of {example.name} have {first:,} tokens"
            raise DataError(location, f"{problem}, more than task.max_length = {limit:,}", "Raise it")
        tokens = tokens[:limit] if self.counts.is_cut(len(tokens), location) else tokens
        sequences = (segments(tokens, first),)
        marks = np.maximum(ends[1:] - 1, 0)  # without separators, a candidate without tokens may end before the first
        return EncodedExample(sequences, example.label, location, example.name, marks=marks, candidates=candidates)

    def model(self, body: Backbone) -> ChoiceModel:
        return ChoiceModel(body, self.config.head.dropout, self.config.run.seed)

    def collate(self, examples: Sequence[Any]) -> Inputs:
        marks, _ = side_by_side([example.marks for example in examples], fill=-1)
        return replace(super().collate(examples), marks=marks)
