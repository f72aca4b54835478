"""Beam search: the likeliest continuations that can be found by following the K likeliest beginnings.

B searches at once, K beams, V vocabulary.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasparse.errors import ConfigError
from megasparse.evaluation.generate import restricted

Step = Callable[[Tensor, Tensor], Tensor]
"""(rows (n,), tokens (n,) int64) -> logits (n, V): goes on with the sequences `rows` of those that the last logits
belong to, repeats allowed, each followed by its token."""


class Hypothesis(NamedTuple):
    tokens: list[int]
    """The text's tokens, without the end token."""
    log_probability: float
    """Log-probability in nats of the tokens and, where it has ended, of the end token."""
    score: float
    """Score, log_probability / length_penalty."""
    ended: bool
    """True if the end token was predicted; else the text was cut off."""


class _Live(NamedTuple):
    tokens: list[int]
    log_probability: float


def check_beams(beams: int, alpha: float) -> None:
    """Raise ConfigError for settings out of range."""
    if beams < 1:
        raise ConfigError("--beams", f"{beams} is less than 1", "Give 1 (the likeliest token each time) or more")
    if not 0.0 <= alpha < math.inf:
        problem = f"{alpha} is not a number >= 0"
        raise ConfigError("--length-penalty", problem, "0 compares sums, 0.6 is usual, more prefers longer texts")


def length_penalty(length: int, alpha: float) -> float:
    """((5 + length)/6)^alpha, by which a hypothesis' log-probability is divided (Wu et al. 2016, Eq. 14, without the
    coverage term). length: its tokens, the end token among them.
    """
    return float(((5 + length) / 6) ** alpha)


@dataclass(frozen=True)
class BeamSettings:
    """Settings of a search. At most `beams` hypotheses of at most `tokens` tokens are followed, which end with the
    token `end`, if any. vocabulary: see `restricted`.
    """

    beams: int
    tokens: int
    end: int | None
    alpha: float = 0.0
    """Exponent of the length penalty."""
    vocabulary: int | None = None


@torch.no_grad()
def beam_search(logits: Tensor, step: Step, settings: BeamSettings) -> list[list[Hypothesis]]:
    """The hypotheses of each of B searches that take their steps together, best score first: those that have ended;
    only if there is none, those that were cut off.

    logits: (B, V), of the first token. A hypothesis that ends among the K likeliest of all continuations is kept; the K
    likeliest others go on. A search is over when K have ended, when none that goes on can still win, or at
    `settings.tokens`. So one beam is greedy search, and as many beams as there are sequences are an exhaustive one.
    """
    searches = [_follow(settings) for _ in logits]
    for search in searches:
        next(search)
    results: list[list[Hypothesis]] = [[] for _ in searches]
    rows_of = {number: slice(number, number + 1) for number in range(len(searches))}  # in the logits
    while rows_of:
        rows, tokens = list[int](), list[int]()
        for number, rows_in_logits in list(rows_of.items()):
            try:
                continuations = searches[number].send(logits[rows_in_logits])
            except StopIteration as over:
                results[number] = over.value
                del rows_of[number]
                continue
            rows_of[number] = slice(len(rows), len(rows) + len(continuations))
            rows += [rows_in_logits.start + row for row, _ in continuations]
            tokens += [token for _, token in continuations]
        if rows:
            logits = step(torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device))
    return results


def _follow(settings: BeamSettings) -> Generator[list[tuple[int, int]], Tensor, list[Hypothesis]]:
    """One search. It is sent the logits (n, V) of its hypotheses, and yields those that go on: number, next token."""
    live, ended = [_Live([], 0.0)], list[Hypothesis]()
    steps: list[tuple[int, int]] = []
    for length in range(1, settings.tokens + 1):
        likely = _likeliest((yield steps), live, settings)
        for row, token, total in likely[: settings.beams]:
            if token == settings.end:
                score = total / length_penalty(length, settings.alpha)
                ended.append(Hypothesis(live[row].tokens, total, score, True))
        survivors = [(row, token, total) for row, token, total in likely if token != settings.end][: settings.beams]
        live = [_Live([*live[row].tokens, token], total) for row, token, total in survivors]
        steps = [(row, token) for row, token, _ in survivors]
        if not live or len(ended) >= settings.beams or _decided(live, ended, settings):
            break
    penalty = length_penalty(settings.tokens, settings.alpha)
    hypotheses = ended or [Hypothesis(x.tokens, x.log_probability, x.log_probability / penalty, False) for x in live]
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[: settings.beams]


def _likeliest(logits: Tensor, live: list[_Live], settings: BeamSettings) -> list[tuple[int, int, float]]:
    """The 2·K likeliest continuations, likeliest first: number in `live`, token, log-probability. K of them may end."""
    log_probabilities = torch.log_softmax(restricted(logits, settings.vocabulary, settings.end).double(), dim=-1)
    totals = log_probabilities + torch.tensor(
        [[x.log_probability] for x in live], dtype=log_probabilities.dtype, device=log_probabilities.device
    )
    best, index = (x[: 2 * settings.beams].tolist() for x in totals.flatten().sort(descending=True, stable=True))
    width = totals.shape[1]
    return [(i // width, i % width, total) for i, total in zip(index, best, strict=True) if total > -math.inf]


def _decided(live: list[_Live], ended: list[Hypothesis], settings: BeamSettings) -> bool:
    """True if no live hypothesis can still win: its log-probability only falls, its penalty is at most the
    longest's."""
    if not ended:
        return False
    return max(x.score for x in ended) >= live[0].log_probability / length_penalty(settings.tokens, settings.alpha)


def search(model: Any, prompts: Tensor, hash_seed: int, settings: BeamSettings) -> list[list[Hypothesis]]:
    """Continuations of each of the prompts (B, n) int64 by cached decoding. model, hash_seed: see `continuations`."""
    return search_with(model, prompts, model.new_cache(len(prompts), hash_seed), settings)


def search_with(model: Any, prompts: Tensor, cache: Any, settings: BeamSettings) -> list[list[Hypothesis]]:
    """Beam search of the prompts with an empty cache of the model's."""
    logits = model.prefill(prompts, cache)

    def step(rows: Tensor, tokens: Tensor) -> Tensor:
        cache.select(rows)
        return model.decode(tokens, cache)

    return beam_search(logits, step, settings)
