"""Tasks that rank the items shown to a user by those chosen before: see news_recommendation.py. B impressions."""

import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from megasparse.errors import ConfigError
from megasparse.tasks.backbones import Backbone
from megasparse.tasks.batches import MULTIPLE, collate, dummy_tokens
from megasparse.tasks.encoding import Counts, Encoded, Encoder, Segments, require_vocabulary, separators_of
from megasparse.tasks.form import Form
from megasparse.tasks.forms.news_recommendation import Impressions, NewsRecommender
from megasparse.tasks.ranking_metrics import ranking
from megasparse.tasks.task import Example, SourceLocation

CANDIDATES = 40
"""Number of candidates of a synthetic impression: about the mean of MIND."""


@dataclass(frozen=True)
class Impression(Encoded):
    """An encoded impression, whose `sequences` are the candidates. Equal texts and equal histories are one object."""

    history: tuple[Segments, ...]

    @property
    def length(self) -> int:
        return max(len(each.tokens) for each in (*self.history, *self.sequences))

    def content(self) -> Iterator[bytes]:
        read = (*self.history, *self.sequences)
        lengths = [len(each.tokens) for each in read]
        yield f"{self.label!r} {len(self.history)} {lengths}\n".encode()
        yield b"".join([each.tokens.tobytes() for each in read])


class ImpressionTable(Sequence[Impression]):
    """Impressions as numbers of their texts and histories, which are objects once; one is built when it is asked for.
    MIND's 2.2 million of 37 candidates take about 0.6 GB.
    """

    def __init__(self, encoded: Iterable[Encoded]):
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._shown, self._labels, self._ends = array("i"), array("b"), array("q", [0])
        self._rows, self._names = array("i"), []
        for each in encoded:
            assert isinstance(each, Impression)
            self._shown.extend(map(self._number, each.sequences))
            self._labels.extend([-1] * len(each.sequences) if each.label is None else each.label)
            self._ends.append(len(self._shown))
            line = -1 if each.location.line is None else each.location.line
            self._rows.extend((self._number(each.history), self._number(each.location.file), line))
            self._names.append(each.name)

    def _number(self, item: Any) -> int:
        """The number of an object, by its identity: equal texts and histories are one object."""
        if id(item) not in self._numbers:
            self._numbers[id(item)] = len(self._objects)
            self._objects.append(item)
        return self._numbers[id(item)]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        first, end = self._ends[index : index + 2]
        shown = tuple(self._objects[number] for number in self._shown[first:end])
        label = None if -1 in self._labels[first:end] else tuple(self._labels[first:end])
        history, file, line = self._rows[3 * index : 3 * index + 3]
        location = SourceLocation(self._objects[file], None if line < 0 else line)
        return Impression(shown, label, location, self._names[index], self._objects[history])


@dataclass
class RankingCounts(Counts):
    """Counts in which `cut`, `empty` and `longest` are those of distinct texts."""

    texts: int = 0
    clicks: int = 0
    unknown: int = 0
    """Number of impressions of users who clicked nothing before."""

    def lines(self, split: str, limit: int) -> list[str]:
        found = super().lines(split, limit)
        found[0] += f"; {self.texts:,} distinct texts" + (f", {self.clicks:,} clicks" if self.clicks else "")
        if self.unknown:
            found.append(f"{split}: {self.unknown:,} impressions have no history: one learned vector stands for it")
        return found


class RankingEncoder(Encoder):
    """Encoder of each distinct text once."""

    counts: RankingCounts

    def encode(self, examples: Iterable[Example]) -> Iterator[Encoded]:
        self.counts = counts = RankingCounts()
        texts: dict[str, Segments] = {}
        histories: dict[tuple[str, ...], tuple[Segments, ...]] = {}

        def read(text: str, example: Example) -> Segments:
            if text not in texts:
                texts[text] = self._join((text,), example.location)
                counts.texts += 1
            return texts[text]

        for example in examples:
            history: Any
            shown: Any
            history, shown = example.inputs
            counts.examples += 1
            counts.clicks += sum(example.label or ())
            counts.unknown += not history
            if history not in histories:
                histories[history] = tuple(read(text, example) for text in history)
            candidates = tuple(read(text, example) for text in shown)
            yield Impression(candidates, example.label, example.location, example.name, histories[history])


class RankingForm(Form):
    """Inputs are the texts chosen before and those shown, labels 0 or 1 of each one shown; answers are their scores.

    A training example is an impression with all its clicks, of which each weighs the same: `training.global_batch`
    counts impressions, and an epoch has every click once. The negatives are drawn anew for each of its steps.
    """

    def encoder(self, start: Any) -> Encoder:
        require_vocabulary(start.body, start.tokenizer.vocabulary)
        return RankingEncoder(self.task, start.tokenizer, start.body.vocabulary, separators=separators_of(start.body))

    def collected(self, encoded: Iterable[Encoded]) -> Sequence[Encoded]:
        return ImpressionTable(encoded)

    def model(self, body: Backbone) -> nn.Module:
        if self.config.head.pooling is not None:
            problem = f'"{self.config.head.pooling}", and news are pooled by additive attention'
            raise ConfigError("head.pooling", problem, "Remove it")
        return NewsRecommender(body, self.config.task.recommendation, self.config.head, self.config.run.seed)

    def collate(self, examples: Sequence[Encoded]) -> Impressions:
        """Each distinct text of the batch comes once."""
        rows: dict[int, int] = {}
        distinct: list[Encoded] = []

        def row(text: Segments, example: Encoded) -> int:
            if id(text) not in rows:
                rows[id(text)] = len(rows)
                distinct.append(Encoded((text,), None, example.location, example.name))
            return rows[id(text)]

        histories, shown, labels = [], [], []
        for example in examples:
            assert isinstance(example, Impression)
            histories.append([row(text, example) for text in example.history])
            shown.append([row(text, example) for text in example.sequences])
            labels.append(example.label)
        (news,) = collate(distinct, self.config.task.max_length).sequences
        numbers = [zlib.crc32(each.sequences[0].tokens.tobytes()) >> 1 for each in distinct]
        history, clicks = _table(histories, self.config.task.recommendation.history)
        candidates, counts = _table(shown, max(map(len, shown)))
        clicked = None if None in labels else _table(labels, candidates.shape[1])[0].bool()
        return Impressions(news, torch.tensor(numbers), history, clicks, candidates, counts, clicked)

    def dummy_batch(self, body: Backbone, batch: int, length: int) -> Impressions:
        """Impressions of full histories and 40 candidates, no two news of which are the same."""
        history = self.config.task.recommendation.history
        each = history + CANDIDATES
        news = dummy_tokens(body.vocabulary, batch * each, length)
        numbers = torch.arange(batch * each)
        rows = numbers.view(batch, each)
        clicked = torch.arange(CANDIDATES).expand(batch, -1) == 0
        counts = (torch.full((batch,), history), torch.full((batch,), CANDIDATES))
        return Impressions(news, numbers, rows[:, :history], counts[0], rows[:, history:], counts[1], clicked)

    def answer(self, example: Encoded, predicted: np.ndarray) -> tuple[float, ...]:
        """The candidates' scores."""
        return tuple(predicted.tolist())

    def row(self, example: Encoded, predicted: np.ndarray) -> dict[str, Any]:
        label = None if example.label is None else list(example.label)
        return {"label": label, "predicted": predicted.tolist()}

    def line(self, row: dict[str, Any]) -> str:
        """MIND's form of submission: the impression's id, and the rank of each candidate, from 1."""
        ranks = np.empty(len(row["predicted"]), dtype=np.int64)
        ranks[ranking(row["predicted"])] = np.arange(1, len(ranks) + 1)
        return f"{row['name']} [{','.join(map(str, ranks.tolist()))}]"


def _table(rows: Sequence[Sequence[int]], limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows side by side, (B, W) int64, W a multiple of 8 or the limit, padded with 0; and their lengths (B,)."""
    width = min(limit, -(-max(1, *map(len, rows)) // MULTIPLE) * MULTIPLE)
    table = np.zeros((len(rows), width), dtype=np.int64)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return torch.from_numpy(table), torch.tensor([len(row) for row in rows])
