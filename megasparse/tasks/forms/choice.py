"""Tasks whose examples have candidates of their own, one of which is the answer: WikiHop. B batch, K candidates."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megasparse.errors import ConfigError, DataError
from megasparse.tasks.backbones import Backbone
from megasparse.tasks.batches import Inputs, dummy_tokens
from megasparse.tasks.encoding import Counts, Encoded, Encoder, Segments, require_vocabulary
from megasparse.tasks.form import Form
from megasparse.tasks.forms.choice_model import ChoiceBatch, ChoiceModel, EncodedChoice, collate
from megasparse.tasks.task import Example

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
