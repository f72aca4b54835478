"""A pretrained body that scores the candidates of a question. B batch, L length, K candidates, E width."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.ops.random import RngContext, dropout
from megasparse.tasks import batches
from megasparse.tasks.backbones import Backbone
from megasparse.tasks.batches import Inputs, Movable
from megasparse.tasks.encoding import Encoded
from megasparse.tasks.forms.label_model import DEVIATION, draw_normal, mean_of


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
