"""Generation with a KV cache: sampling and beam search.

B batch, n tokens of a prompt, K beams, V vocabulary.
"""

import json
import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megasparse.config.messages import show
from megasparse.config.schema import Config
from megasparse.data.tokenizers import Tokenizer
from megasparse.errors import ConfigError
from megasparse.files import read_file
from megasparse.ops.random import derive
from megasparse.training.ranks import Ranks


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling, see `megasparse.generate`."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Seed of row 0; other rows use a seed derived from (seed, row)."""

    def check(self) -> None:
        for name, valid, interval, hint in (
            ("temperature", 0.0 <= self.temperature < math.inf, "is not a number >= 0", "0 is greedy"),
            ("top_p", 0.0 < self.top_p <= 1.0, "is not in (0, 1]", "1 samples from all tokens"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "is not in [0, 1]", "0 samples from all tokens"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "is not a number > 0", "1 disables it"),
            ("seed", 0 <= self.seed < 1 << 63, "is not a whole number from 0 to 2^63 - 1", "0 is the default"),
        ):
            if not valid:
                raise ConfigError(f"--{name.replace('_', '-')}", f"{getattr(self, name)} {interval}", hint)

    def generator(self, row: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive(self.seed, "sampled row", row) >> 1 if row else self.seed)


class SharedDecoder:
    """A decoder whose heads, and their caches, are divided among ranks. All make the same calls and get the same
    logits.
    """

    def __init__(self, decoder: Any, sequence: ProcessGroup):
        self.new_cache = partial(decoder.new_cache, sequence=sequence)
        self.prefill, self.decode = decoder.prefill, decoder.decode


def shared_decoder(decoder: Any, ranks: Ranks) -> Any:
    """Return the decoder for ranks that generate one text."""
    if ranks.sequence_size < ranks.world_size:
        problem = f"{ranks.sequence_size}, but {ranks.world_size} ranks generate one text"
        raise ConfigError("parallel.sequence", problem, f"Set it to {ranks.world_size}")
    return decoder if ranks.sequence is None else SharedDecoder(decoder, ranks.sequence)


def check_length(prompt: int, tokens: int, max_length: int) -> None:
    if tokens < 0:
        raise ConfigError("--tokens", f"{tokens} is negative", "Give 0 or more")
    if prompt + tokens > max_length:
        fewer = f"Give {max_length - prompt} or fewer, or shorten" if prompt < max_length else "Shorten"
        problem = f"a prompt of {prompt} tokens and {tokens} new tokens exceed model.max_length = {max_length}"
        raise ConfigError("--tokens", problem, f"{fewer} the prompt")


def end_tokens(config: Config, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a decoder's text: its `document_separator`, and for an imported model the `eos_token_id`
    of generation_config.json.
    """
    separator, ids = config.model.end_token, list[Any]()
    settings = None if tokenizer.file is None else tokenizer.file.with_name("generation_config.json")
    if config.model.kind == "decoder" and settings is not None and settings.is_file():
        try:
            value = json.loads(read_file(settings, 1 << 20)).get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError):
            raise ConfigError(str(settings), "cannot be read as a JSON object of at most 1 MiB", "Restore it") from None
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < config.model.vocabulary for token in ids):
            raise ConfigError(
                str(settings),
                f"eos_token_id = {show(value)} is not an id, nor a list",
                f"Use ids below {config.model.vocabulary}",
            )
    return frozenset(ids) | (set() if separator is None else {separator})


def generate(
    model: Any,
    prompt: Tensor,
    tokens: int,
    *,
    hash_seed: int,
    vocabulary: int | None = None,
    ends: Collection[int] = (),
    **sampling: Any,
) -> Iterator[int]:
    """Yield up to `tokens` ids that continue `prompt` (n,), before a token in `ends`. sampling: of `Sampling`."""
    settings: dict[str, Any] = {"hash_seed": hash_seed, "vocabulary": vocabulary, "ends": ends}
    for (token,) in continuations(model, prompt[None], tokens, sampling=Sampling(**sampling), **settings):
        if token in ends:
            return
        yield token


@torch.no_grad()
def continuations(
    model: Any,
    prompts: Tensor,
    tokens: int,
    *,
    hash_seed: int,
    sampling: Sampling = Sampling(),
    first_row: int = 0,
    vocabulary: int | None = None,
    ends: Collection[int] = (),
) -> Iterator[list[int]]:
    """Yield `tokens` times a list with the next token id of each prompt.

    model: provides new_cache(batch, seed), prefill((B, n) tokens, cache) and decode((B,) tokens, cache), which return
    the next token's logits (B, V). prompts: (B, n) int64. hash_seed: of the rotations. first_row: number of the first
    prompt, for its seed; samples do not depend on the batch except for rounding. vocabulary, ends: see `restricted`.
    """
    generators = [sampling.generator(first_row + row) for row in range(len(prompts))]
    cache, texts = model.new_cache(len(prompts), hash_seed), prompts.tolist()
    logits = model.prefill(prompts, cache) if tokens else None
    for count in range(tokens):
        assert logits is not None
        rows = restricted(logits.float().cpu(), vocabulary, ends)
        picks = [sample(*row_of, sampling) for row_of in zip(rows, texts, generators, strict=True)]
        yield picks
        for text, pick in zip(texts, picks, strict=True):
            text.append(pick)
        if count + 1 < tokens:
            logits = model.decode(torch.tensor(picks, device=prompts.device), cache)


def restricted(logits: Tensor, vocabulary: int | None, ends: Collection[int]) -> Tensor:
    """Return logits (B, V) with −∞ for ids of `vocabulary` or more, which the tokenizer lacks, except `ends`."""
    if vocabulary is None:
        return logits
    hidden = torch.arange(logits.shape[1], device=logits.device) >= vocabulary
    hidden[list(ends)] = False
    return logits.masked_fill(hidden, -torch.inf)


def sample(logits: Tensor, text: Sequence[int], generator: torch.Generator, settings: Sampling) -> int:
    """Sample one token id from logits (V,). text: token ids so far, for the repetition penalty."""
    logits, penalty = logits.double(), settings.repetition_penalty
    if penalty != 1.0:
        repeated = torch.zeros(len(logits), dtype=torch.bool).index_fill(0, torch.tensor(text, dtype=torch.long), True)
        logits = torch.where(repeated, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if settings.temperature == 0.0:
        return int(logits.argmax())
    probabilities = torch.softmax((logits - logits.max()) / settings.temperature, dim=0)
    probabilities, order = probabilities.sort(descending=True, stable=True)
    before = probabilities.cumsum(0) - probabilities  # total of more likely tokens
    nucleus = probabilities * (before < settings.top_p) * (probabilities >= settings.min_p * probabilities[0])
    return int(order[torch.multinomial(nucleus, 1, generator=generator)])


# Beam search

Step = Callable[[Tensor, Tensor], Tensor]
"""(rows (n,), tokens (n,) int64) -> logits (n, V): select the sequences `rows` of the previous call, with repetitions,
and append a token to each."""


class Hypothesis(NamedTuple):
    """ended: False if the text was truncated, else the log-probability includes the end token."""

    tokens: list[int]
    """Token ids without the end token."""
    log_probability: float
    score: float
    """Log-probability / `length_penalty`."""
    ended: bool


class _Live(NamedTuple):
    tokens: list[int]
    log_probability: float


def check_beams(beams: int, alpha: float) -> None:
    if beams < 1:
        raise ConfigError("--beams", f"{beams} is less than 1", "Give 1 (greedy search) or more")
    if not 0.0 <= alpha < math.inf:
        raise ConfigError("--length-penalty", f"{alpha} is not a number >= 0", "0 disables it, 0.6 is usual")


def length_penalty(length: int, alpha: float) -> float:
    """Return ((5 + length)/6)^alpha, the divisor of a hypothesis' log-probability (Wu et al. 2016, Eq. 14, without the
    coverage term).
    """
    return float(((5 + length) / 6) ** alpha)


@dataclass(frozen=True)
class BeamSettings:
    """Settings of a beam search for `beams` hypotheses of at most `tokens` tokens that end with a token in `ends`."""

    beams: int
    tokens: int
    ends: Collection[int] = ()
    alpha: float = 0.0
    vocabulary: int | None = None


@torch.no_grad()
def beam_search(logits: Tensor, step: Step, settings: BeamSettings) -> list[list[Hypothesis]]:
    """Run B beam searches in parallel. logits: (B, V), of the first token.

    In each step, hypotheses that end among the K most likely continuations are completed, and the K most likely other
    ones are continued. A search stops when K hypotheses have ended, when no other one can reach a better score, or at
    `settings.tokens`. Returns per search the completed hypotheses, best first, else truncated ones.
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
    """Run one search as a coroutine: receive logits (n, V), yield (number of the hypothesis, next token)."""
    live, ended = [_Live([], 0.0)], list[Hypothesis]()
    penalty = length_penalty(settings.tokens, settings.alpha)
    steps: list[tuple[int, int]] = []
    for length in range(1, settings.tokens + 1):
        likely = _likeliest((yield steps), live, settings)
        for row, token, total in likely[: settings.beams]:
            if token in settings.ends:
                ended.append(Hypothesis(live[row].tokens, total, total / length_penalty(length, settings.alpha), True))
        survivors = [pick for pick in likely if pick[1] not in settings.ends][: settings.beams]
        live = [_Live([*live[row].tokens, token], total) for row, token, total in survivors]
        steps = [(row, token) for row, token, _ in survivors]
        if not live or len(ended) >= settings.beams:
            break
        # Log-probabilities only decrease, and `penalty` is the largest divisor: no live hypothesis can win.
        if ended and max(x.score for x in ended) >= live[0].log_probability / penalty:
            break
    hypotheses = ended or [Hypothesis(x.tokens, x.log_probability, x.log_probability / penalty, False) for x in live]
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[: settings.beams]


def _likeliest(logits: Tensor, live: list[_Live], settings: BeamSettings) -> list[tuple[int, int, float]]:
    """Return the (1 + ends)·K most likely continuations, as (number in `live`, token, log-probability)."""
    log_probabilities = torch.log_softmax(restricted(logits, settings.vocabulary, settings.ends).double(), dim=-1)
    totals = log_probabilities + torch.tensor(
        [[x.log_probability] for x in live], dtype=log_probabilities.dtype, device=log_probabilities.device
    )
    most = (1 + len(settings.ends)) * settings.beams
    best, index = (x[:most].tolist() for x in totals.flatten().sort(descending=True, stable=True))
    width = totals.shape[1]
    return [(i // width, i % width, total) for i, total in zip(index, best, strict=True) if total > -math.inf]


def search(model: Any, prompts: Tensor, hash_seed: int, settings: BeamSettings) -> list[list[Hypothesis]]:
    return search_with(model, prompts, model.new_cache(len(prompts), hash_seed), settings)


def search_with(model: Any, prompts: Tensor, cache: Any, settings: BeamSettings) -> list[list[Hypothesis]]:
    """Run beam search on the prompts with an empty cache."""
    logits = model.prefill(prompts, cache)

    def step(rows: Tensor, tokens: Tensor) -> Tensor:
        cache.select(rows)
        return model.decode(tokens, cache)

    return beam_search(logits, step, settings)
