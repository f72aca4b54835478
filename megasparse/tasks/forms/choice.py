"""Tasks whose examples have their own candidates, one of which is the answer (WikiHop).

B batch, L length, K candidates, E width.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.errors import ConfigError, DataError
from megasparse.ops.random import RngContext, dropout
from megasparse.tasks import batches
from megasparse.tasks.backbones import Backbone
from megasparse.tasks.batches import (
    Counts,
    Encoded,
    Encoder,
    Inputs,
    Movable,
    Segments,
    dummy_tokens,
    require_vocabulary,
)
from megasparse.tasks.form import Form
from megasparse.tasks.forms.labels import DEVIATION, draw_normal, mean_of
from megasparse.tasks.task import Example


@dataclass(frozen=True)
class EncodedChoice(Encoded):
    marks: np.ndarray
    """Places, int64 (K,): where in the sequence each candidate's score is read."""
    candidates: tuple[str, ...]
    """Texts of the candidates."""

    def content(self) -> Iterator[bytes]:
        yield from super().content()
        yield self.marks.tobytes()


@dataclass(frozen=True)
class ChoiceBatch(Movable):
    """A micro-batch of questions."""

    inputs: Inputs
    """The sequences, one an example; labels are numbers of candidates."""
    marks: Tensor
    """Places, int64 (B, K): the marks of each example's own candidates, then -1."""

    def numel(self) -> int:
        """Number of tokens read, without padding."""
        return self.inputs.numel()


def collate(examples: Sequence[EncodedChoice], limit: int) -> ChoiceBatch:
    """A batch of questions. limit: tokens of the longest sequence that the model takes."""
    marks = np.full((len(examples), max(len(each.marks) for each in examples)), -1)
    for row, each in enumerate(examples):
        marks[row, : len(each.marks)] = each.marks
    return ChoiceBatch(batches.collate(examples, limit), torch.from_numpy(marks))


class ChoiceModel(nn.Module):
    """Model that scores the candidates of a question: a candidate's score is w·dropout(h), h the body's final state at
    its mark, as Longformer's model of WikiHop has it (Beltagy et al. 2020); p = softmax of the scores of an example's
    own candidates.
    """

    varying_token_counts = False

    def __init__(self, body: Backbone, rate: float, seed: int):
        """Make the model. rate: dropout probability."""
        super().__init__()
        self.body, self.rate = body, rate
        self.output = nn.Linear(body.width, 1, bias=False)  # a softmax does not see a bias
        draw_normal(self.output.weight, DEVIATION, seed, "initial head", "choice")

    def forward(self, batch: ChoiceBatch, rng: RngContext) -> tuple[Tensor, dict[str, Any]]:
        """The objective, mean cross-entropy of an example in nats plus auxiliary losses; and the statistics of
        tasks/form.py, an example weighing 1, and `accuracy`. `predicted` is (its K,) fp32 for each example. Without
        labels the loss is 0.
        """
        scores, auxiliary = self.scores(batch, rng)
        labels = batch.inputs.labels
        costs = None if labels is None else F.cross_entropy(scores, labels, reduction="none")
        loss, found = mean_of(costs, scores, rng)
        if labels is not None:
            found["accuracy"] = (scores.argmax(1) == labels).float().mean()
        if not rng.training:
            own = (batch.marks >= 0).sum(1).tolist()
            found["predicted"] = [row[:k] for row, k in zip(scores, own, strict=True)]
        weight: Any = self.body.task_weight
        return weight * loss + auxiliary, found

    def scores(self, batch: ChoiceBatch, rng: RngContext) -> tuple[Tensor, Tensor]:
        """The scores (B, K) fp32, -inf where an example has no candidate; and the auxiliary losses."""
        states, auxiliary = self.body(batch.inputs.sequences[0], rng, None)
        rows = torch.arange(len(states), device=states.device).unsqueeze(1)
        marked = states[rows, batch.marks.clamp(min=0)].to(self.output.weight.dtype)
        if rng.training:
            key, places = rng.key(-1, "choice dropout"), rng.rows(marked.shape[1], marked.device)
            marked = dropout(marked, self.rate, key, places)
        scores = self.output(marked).squeeze(-1).float()
        return scores.masked_fill(batch.marks < 0, -torch.inf), auxiliary


DUMMY_CANDIDATES = 79
"""Number of candidates of a synthetic example: the most that WikiHop has."""


@dataclass(frozen=True)
class Choice(Example):
    """`inputs`: the question, its candidates, and the texts to read. `label`: the right candidate's number, from 0."""

    candidates: int


class ChoiceEncoder(Encoder):
    """Encoder to one sequence: [begin] question [separator] candidate [separator] ... candidate [separator] text
    [separator] ..., of type 0 up to the last candidate's separator and 1 from there on. A candidate's mark, where its
    score is read, is the separator behind it: there a decoder, too, has read it. Without special tokens nothing stands
    at the beginning, and a line end in place of separators where the tokens are bytes; other tokenizers have none, and
    the mark is the candidate's last token.

    Question and candidates are always whole. What is too long loses the end of its texts.
    """

    def encode(self, examples: Iterable[Example]) -> Iterator[Encoded]:
        """Encode as Encoder.encode; raises DataError also where question and candidates alone are too long."""
        self.counts = Counts()
        for example in examples:
            assert isinstance(example, Choice), 'a task of the form "choice" reads choices'
            self.counts.examples += 1
            yield self._encoded(example)

    def _encoded(self, example: Choice) -> EncodedChoice:
        begin, separator = self._frame(2)[:2]
        ids = [np.concatenate([self._ids(each, example.location), separator]) for each in example.inputs]
        asked = 1 + example.candidates
        marks = len(begin) + np.cumsum([len(each) for each in ids[:asked]])[1:] - 1
        tokens = np.concatenate([begin, *ids])
        first = len(begin) + sum(map(len, ids[:asked]))
        limit, location = self.config.max_length, example.location
        self.counts.longest = max(self.counts.longest, len(tokens))
        if first > limit:
            problem = f"question and {example.candidates} candidates of {example.name} alone are {first:,} tokens"
            hint = "Raise it, or remove the example: they are never cut"
            raise DataError(str(location), f"{problem}, more than task.max_length = {limit:,}", hint)
        if len(tokens) > limit:
            self._refuse_or_count_cut(len(tokens), location)
            tokens = tokens[:limit]
        types = (np.arange(len(tokens)) >= first).astype(np.int64)
        names = tuple(str(each) for each in example.inputs[1:asked])
        sequence = Segments(tokens, types)
        # A candidate without tokens, where there are no separators either, may end before anything begins.
        return EncodedChoice((sequence,), example.label, location, example.name, np.maximum(marks, 0), names)


class ChoiceForm(Form):
    """Cross-entropy over an example's own candidates; answers are their numbers."""

    def encoder(self, start: Any) -> ChoiceEncoder:
        require_vocabulary(start.body, start.tokenizer.vocabulary)
        return ChoiceEncoder(self.task, start.tokenizer, start.body.vocabulary)

    def check(self, body: Backbone) -> None:
        head, hint = self.config.head, "Remove it: a candidate is scored by one linear layer at its mark"
        for key, value in (("pooling", head.pooling), ("hidden", head.hidden)):
            if value:
                raise ConfigError(f"head.{key}", f"{value!r}, and {self.task.name} pools nothing", hint)

    def model(self, body: Backbone) -> ChoiceModel:
        return ChoiceModel(body, self.config.head.dropout, self.config.run.seed)

    def collate(self, examples: Sequence[Any]) -> ChoiceBatch:
        return collate(examples, self.config.task.max_length)

    def dummy_batch(self, body: Backbone, batch: int, length: int) -> ChoiceBatch:
        """Random tokens and many candidates, of which the first is right."""
        read = dummy_tokens(body.vocabulary, batch, length)
        marks = torch.arange(min(DUMMY_CANDIDATES, int(read.lengths[0]))).repeat(batch, 1)
        return ChoiceBatch(Inputs((read,), torch.zeros(batch, dtype=torch.int64)), marks)

    def answer(self, example: Encoded, predicted: np.ndarray) -> int:
        """The candidate of the highest score; of equal ones the first."""
        return int(predicted.argmax())

    def row(self, example: Any, predicted: np.ndarray) -> dict[str, Any]:
        """`label` and `predicted` are texts of candidates; `scores` are logits by candidate."""
        label, names = example.label, example.candidates
        return {
            "label": None if label is None else names[label],
            "predicted": names[self.answer(example, predicted)],
            "scores": dict(zip(names, predicted.tolist(), strict=True)),
        }
