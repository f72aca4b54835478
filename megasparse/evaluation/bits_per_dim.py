"""Held-out bits/dim, sum of nats / (ln 2 × tokens), and accuracy, over every token of a split.

The split is divided into windows of T tokens. By default, as in Reformer, windows do not overlap and all tokens are
scored, the first from the model's learned start vector. With a stride S < T, windows start every S tokens, and each
after the first scores only its last S, with at least T − S tokens of context. Batches and ranks add sums (in float64)
and counts, never means.

B batch, T window.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from tqdm import tqdm

from megasparse.errors import ConfigError, UserError
from megasparse.model.stack import cut
from megasparse.ops.random import RngContext
from megasparse.training.ranks import Ranks

Scorer = Callable[[Tensor, RngContext, int], tuple[Tensor, Tensor, Tensor]]
"""(tokens (B, T) int64, random draws, n) -> sum of nats, number of correct predictions, and number of scored tokens,
without the first n tokens of each window."""


class Stream(typing.Protocol):
    """A split as a sequence of tokens, such as data.reader.EvaluationStream."""

    tokens: int

    def read(self, start: int, stop: int) -> Tensor: ...  # (stop - start,)


@dataclass(frozen=True)
class Score:
    """Sums over `dims` scored tokens: nats, and tokens that the model ranks first."""

    nats: float
    correct: float
    dims: int

    @property
    def bits_per_dim(self) -> float:
        return self.nats / (math.log(2.0) * self.dims)

    @property
    def accuracy(self) -> float:
        return self.correct / self.dims


@dataclass(frozen=True)
class ScoredWindow:
    """Tokens start..stop of the split, of which first..stop are scored."""

    start: int
    stop: int
    first: int

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens, and tokens at the start that are not scored."""
        return self.stop - self.start, self.first - self.start


@dataclass(frozen=True)
class Windows:
    """How to divide a split: windows of `length` tokens, one every `stride` tokens, evaluated `batch` at once."""

    length: int
    stride: int | None = None
    """Tokens, by default the whole window."""
    score_from: int = 0
    """Tokens at the start of each window that are never scored."""
    batch: int = 1
    limit: int | None = None
    """Most windows."""

    def of(self, total: int) -> Iterator[ScoredWindow]:
        """Yield windows that score each of `total` tokens once; the last may be shorter. Raises ConfigError unless
        1 <= stride <= length.
        """
        length, stride = self.length, self.length if self.stride is None else self.stride
        if not 1 <= stride <= length:
            problem = f"{stride} is not from 1 to the window's {length} tokens"
            raise ConfigError("--stride", problem, f"Try {length // 2}")
        scored = 0
        for start in range(0, total, stride):
            stop = min(start + length, total)
            first = max(scored, start + self.score_from)
            if first < stop:
                yield ScoredWindow(start, stop, first)
            scored = stop
            if stop == total:
                return


@torch.no_grad()
def score(
    scorer: Scorer,
    stream: Stream,
    windows: Windows,
    seed: int,
    *,
    rounds: int | None = None,
    ranks: Ranks | None = None,
    progress: bool = False,
) -> Score:
    """Score a split. All ranks call it and return the same Score.

    Ranks divide the windows and run the model equally often, as ZeRO-3 requires. With sequence parallelism, every
    scorer of a group gets the whole window and returns its part of the sums. seed: of the random draws (hash rotations,
    an encoder's masks). rounds: hash rounds instead of the configured ones.
    """
    ranks = ranks or Ranks()
    batch, limit = windows.batch, windows.limit
    if limit is not None and limit < 1:
        raise ConfigError("--limit", f"{limit} windows cannot be scored", "Give 1 or more, or remove it to score all")
    scored = list(windows.of(stream.tokens))[:limit]
    alike = (list(group) for _, group in groupby(scored, key=lambda window: window.shape))
    batches = [group[first : first + batch] for group in alike for first in range(0, len(group), batch)]
    if not batches:
        raise ConfigError("model.score_from", f"{windows.score_from} excludes all tokens of this split", "Lower it")
    sums = torch.zeros(3, dtype=torch.float64, device=ranks.device)  # nats, correct, dims
    steps = range(0, len(batches), ranks.data_ranks)
    for first in tqdm(steps, desc="scoring", unit="batch", disable=None if progress else True):
        number = first + ranks.data_rank
        group = batches[min(number, len(batches) - 1)]
        tokens = torch.stack([stream.read(window.start, window.stop) for window in group]).to(ranks.device)
        # Draws depend on a window's start, so they do not depend on the batch.
        samples = torch.tensor([window.start for window in group])
        rng = dataclasses.replace(RngContext.evaluation(seed, len(group), rounds), samples=samples)
        parts = scorer(tokens, rng, group[0].shape[1])
        if number < len(batches):
            sums += torch.stack([part.to(ranks.device, torch.float64) for part in parts])
    # Checked only after the all-reduce: a rank that stopped earlier would leave the others waiting.
    if not ranks.sum(sums).isfinite().all():
        raise UserError("the model's nats are not finite on this split: evaluate an earlier checkpoint, or in fp32")
    return Score(float(sums[0]), float(sums[1]), int(sums[2]))


def of_model(model: Any, sequence: ProcessGroup | None = None) -> Scorer:
    """Return the scorer of a model with `token_scores`. sequence: ranks that split each window."""

    def sums(tokens: Tensor, rng: RngContext, skip: int) -> tuple[Tensor, Tensor, Tensor]:
        if sequence is None:
            scores = model.token_scores(tokens, rng)
        else:
            tokens, padding = cut(tokens, model.config, sequence)
            scores = model.token_scores(tokens, rng, padding)
            skip = max(0, skip - padding.part.rank * tokens.shape[1])
        nats, correct, scored = (x[:, skip:] for x in scores)
        return nats[scored].double().sum(), correct[scored].sum(), scored.sum()

    return sums


def of_engine(evaluate: Callable[[Tensor, RngContext], tuple[Tensor, dict[str, Tensor]]]) -> Scorer:
    """Return the scorer of a training engine's `evaluate`, which sums over all scored tokens: without a stride."""

    def sums(tokens: Tensor, rng: RngContext, skip: int) -> tuple[Tensor, Tensor, Tensor]:
        metrics = evaluate(tokens, rng)[1]
        return metrics["nats"], metrics["accuracy"] * metrics["tokens"], metrics["tokens"]

    return sums


def refuse_leaks(leaks: list[str]) -> None:
    """Raise ConfigError for a non-causal model, which has neither a code length nor cached decoding."""
    if leaks:
        raise ConfigError(
            "model.attention",
            f"not strictly causal ({', '.join(leaks)}), so its bits/dim is not a code length",
            'Train with the strictly causal setting window = "band", or evaluate with --allow-leaking-attention',
        )
