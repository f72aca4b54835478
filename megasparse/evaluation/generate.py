"""Sequences from a model, token by token, by cached decoding: sampled, or found by beam search, which follows the K
likeliest beginnings.

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
    """Settings of `sample`. seed: row 0 draws by the seed itself, every other one by (seed, row)."""

    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Nucleus: the fewest likeliest tokens whose probabilities sum to this or more."""
    min_p: float = 0.0
    """Smallest probability of a token, as a share of the likeliest one's."""
    repetition_penalty: float = 1.0
    """Divisor of positive and factor of negative logits of the tokens in the prompt and the text so far."""
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError for settings out of range."""
        for name, valid, interval, hint in (
            ("temperature", 0.0 <= self.temperature < math.inf, "is not a number >= 0", "0 takes the likeliest token"),
            ("top_p", 0.0 < self.top_p <= 1.0, "is not in (0, 1]", "1 samples from all tokens"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "is not in [0, 1]", "0 samples from all tokens"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "is not a number > 0", "1 is no penalty"),
            ("seed", 0 <= self.seed < 1 << 63, "is not a whole number from 0 to 2^63 - 1", "0 is the default"),
        ):
            if not valid:
                raise ConfigError(f"--{name.replace('_', '-')}", f"{getattr(self, name)} {interval}", hint)

    def generator(self, row: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive(self.seed, "sampled row", row) >> 1 if row else self.seed)


class SharedDecoder:
    """A decoder whose heads ranks share out, with a decoder's interface. Each calls it alike, and has the same logits,
    but the cache of its heads alone.
    """

    def __init__(self, decoder: Any, sequence: ProcessGroup):
        self.new_cache = partial(decoder.new_cache, sequence=sequence)
        self.prefill, self.decode = decoder.prefill, decoder.decode


def shared_decoder(decoder: Any, ranks: Ranks) -> Any:
    """Return the decoder for ranks that write one text. Raises ConfigError where not all share out the heads."""
    if ranks.sequence_size < ranks.world_size:
        problem = f"{ranks.sequence_size}, but {ranks.world_size} ranks are to write one text"
        raise ConfigError("parallel.sequence", problem, f"Set it to {ranks.world_size}")
    return decoder if ranks.sequence is None else SharedDecoder(decoder, ranks.sequence)


def check_length(prompt: int, tokens: int, max_length: int) -> None:
    """Raise ConfigError unless `tokens` tokens fit behind a prompt of `prompt` tokens."""
    if tokens < 0:
        raise ConfigError("--tokens", f"{tokens} is negative", "Ask for 1 or more")
    if prompt + tokens > max_length:
        hint = f"Ask for {max(0, max_length - prompt)} or fewer, or shorten the prompt"
        problem = f"{prompt} tokens of prompt and {tokens} more do not fit model.max_length = {max_length}"
        raise ConfigError("--tokens", problem, hint)


LARGEST_SETTINGS = 1 << 20
"""Bytes of the largest generation_config.json that is read."""


def end_tokens(config: Config, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a decoder's text: its `document_separator`, and for an imported model the `eos_token_id`
    (one or a list) of the generation_config.json next to its tokenizer.json.

    Raises ConfigError for a damaged generation_config.json.
    """
    separator, ids = config.model.document_separator, list[Any]()
    settings = None if tokenizer.file is None else tokenizer.file.with_name("generation_config.json")
    if config.model.kind == "decoder" and settings is not None and settings.is_file():
        try:
            value = json.loads(read_file(settings, LARGEST_SETTINGS)).get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError):
            raise ConfigError(str(settings), "cannot be read as a JSON object of at most 1 MiB", "Restore it") from None
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < config.model.vocabulary for token in ids):
            problem = f"eos_token_id = {show(value)} is not an id, or a list of ids"
            raise ConfigError(str(settings), problem, f"Restore it, with ids below {config.model.vocabulary}")
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
    """Yield `tokens` token ids that continue `prompt` (n,) int64, or those before one of `ends`.

    See `continuations`. sampling: fields of `Sampling`.
    """
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
    """Yield `tokens` times the next token id of each of the prompts (B, n) int64, which stand on the model's device.

    model: has new_cache(batch, seed), and prefill((B, n) tokens, cache) and decode((B,) tokens, cache), which return
    the next token's logits (B, V). hash_seed: of the rotations, the run's seed. first_row: the first prompt's number
    among all that are drawn with this seed; which other ones stand beside it changes nothing but rounding. vocabulary,
    ends: see `restricted`.
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
    """Logits (B, V) with −∞ for the ids that are never drawn: those from `vocabulary` on (a softmax may be wider than
    the tokenizer; None: all may be drawn), except `ends`.
    """
    if vocabulary is None:
        return logits
    hidden = torch.arange(logits.shape[1], device=logits.device) >= vocabulary
    hidden[list(ends)] = False
    return logits.masked_fill(hidden, -torch.inf)


def sample(logits: Tensor, text: Sequence[int], generator: torch.Generator, settings: Sampling) -> int:
    """Draw one token id from logits (V,), as `settings` say, after the tokens of a text."""
    logits, penalty = logits.double(), settings.repetition_penalty
    if penalty != 1.0:
        repeated = torch.zeros(len(logits), dtype=torch.bool).index_fill(0, torch.tensor(text, dtype=torch.long), True)
        logits = torch.where(repeated, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if settings.temperature == 0.0:
        return int(logits.argmax())
    probabilities = torch.softmax((logits - logits.max()) / settings.temperature, dim=0)
    probabilities, order = probabilities.sort(descending=True, stable=True)
    before = probabilities.cumsum(0) - probabilities  # of the likelier tokens
    nucleus = probabilities * (before < settings.top_p) * (probabilities >= settings.min_p * probabilities[0])
    return int(order[torch.multinomial(nucleus, 1, generator=generator)])


# Beam search

Step = Callable[[Tensor, Tensor], Tensor]
"""(rows (n,), tokens (n,) int64) -> logits (n, V): goes on with the sequences `rows` of those that the last logits
belong to, repeats allowed, each followed by its token."""


class Hypothesis(NamedTuple):
    tokens: list[int]
    """The text's tokens, without the one that ended it."""
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
    """Settings of a search. At most `beams` hypotheses of at most `tokens` tokens are followed, which end with one of
    the tokens `ends`. vocabulary: see `restricted`.
    """

    beams: int
    tokens: int
    ends: Collection[int] = ()
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
    penalty = length_penalty(settings.tokens, settings.alpha)
    steps: list[tuple[int, int]] = []
    for length in range(1, settings.tokens + 1):
        likely = _likeliest((yield steps), live, settings)
        for row, token, total in likely[: settings.beams]:
            if token in settings.ends:
                score = total / length_penalty(length, settings.alpha)
                ended.append(Hypothesis(live[row].tokens, total, score, True))
        survivors = [pick for pick in likely if pick[1] not in settings.ends][: settings.beams]
        live = [_Live([*live[row].tokens, token], total) for row, token, total in survivors]
        steps = [(row, token) for row, token, _ in survivors]
        if not live or len(ended) >= settings.beams:
            break
        # A live log-probability only falls, and its penalty is at most the longest's: it can no longer win.
        if ended and max(x.score for x in ended) >= live[0].log_probability / penalty:
            break
    hypotheses = ended or [Hypothesis(x.tokens, x.log_probability, x.log_probability / penalty, False) for x in live]
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[: settings.beams]


def _likeliest(logits: Tensor, live: list[_Live], settings: BeamSettings) -> list[tuple[int, int, float]]:
    """The (1 + ends)·K likeliest continuations, likeliest first: number in `live`, token, log-probability. As many as
    end may be among the first, and K others remain."""
    log_probabilities = torch.log_softmax(restricted(logits, settings.vocabulary, settings.ends).double(), dim=-1)
    totals = log_probabilities + torch.tensor(
        [[x.log_probability] for x in live], dtype=log_probabilities.dtype, device=log_probabilities.device
    )
    most = (1 + len(settings.ends)) * settings.beams
    best, index = (x[:most].tolist() for x in totals.flatten().sort(descending=True, stable=True))
    width = totals.shape[1]
    return [(i // width, i % width, total) for i, total in zip(index, best, strict=True) if total > -math.inf]


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
