"""Sequences from a model, token by token, by cached decoding.

B batch, n tokens of a prompt, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megasparse.errors import ConfigError
from megasparse.ops.random import derive
from megasparse.training.ranks import Ranks


@dataclass(frozen=True)
class Sampling:
    """Settings of `sample`. seed: row 0 draws by the seed itself, every other one by (seed, row)."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError for settings out of range."""
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(
                "--temperature", f"{self.temperature} is not a number >= 0", "0 takes the likeliest token, 1 samples"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError("--top-p", f"{self.top_p} is not in (0, 1]", "1 samples from all tokens")

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


def generate(
    model: Any,
    prompt: Tensor,
    tokens: int,
    *,
    hash_seed: int,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    vocabulary: int | None = None,
    end: int | None = None,
) -> Iterator[int]:
    """Yield `tokens` token ids that continue `prompt` (n,) int64, or those before `end`. See `continuations`."""
    sampling = Sampling(temperature, top_p, seed)
    continuation = continuations(
        model, prompt[None], tokens, hash_seed=hash_seed, sampling=sampling, vocabulary=vocabulary, end=end
    )
    for (token,) in continuation:
        if token == end:
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
    end: int | None = None,
) -> Iterator[list[int]]:
    """Yield `tokens` times the next token id of each of the prompts (B, n) int64, which stand on the model's device.

    model: has new_cache(batch, seed), and prefill((B, n) tokens, cache) and decode((B,) tokens, cache), which return
    the next token's logits (B, V). hash_seed: of the rotations, the run's seed. first_row: the first prompt's number
    among all that are drawn with this seed; which other ones stand beside it changes nothing but rounding. vocabulary,
    end: see `restricted`.
    """
    generators = [sampling.generator(first_row + row) for row in range(len(prompts))]
    cache = model.new_cache(len(prompts), hash_seed)
    logits = model.prefill(prompts, cache) if tokens else None
    for count in range(tokens):
        assert logits is not None
        rows = restricted(logits.float().cpu(), vocabulary, end)
        picks = [
            sample(row, sampling.temperature, sampling.top_p, generator)
            for row, generator in zip(rows, generators, strict=True)
        ]
        yield picks
        if count + 1 < tokens:
            logits = model.decode(torch.tensor(picks, device=prompts.device), cache)


def restricted(logits: Tensor, vocabulary: int | None, end: int | None) -> Tensor:
    """Logits (B, V) with −∞ for the ids that are never drawn: those from `vocabulary` on (a softmax may be wider than
    the tokenizer; None: all may be drawn), except `end`.
    """
    if vocabulary is None:
        return logits
    hidden = torch.arange(logits.shape[1], device=logits.device) >= vocabulary
    if end is not None:
        hidden[end] = False
    return logits.masked_fill(hidden, -torch.inf)


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token id from logits (V,): the likeliest at temperature 0, else drawn from the nucleus, the fewest likeliest
    tokens whose probabilities at this temperature sum to `top_p` or more."""
    if temperature == 0.0:
        return int(logits.argmax())
    scaled = (logits.double() - logits.double().max()) / temperature
    probabilities, order = torch.softmax(scaled, dim=0).sort(descending=True, stable=True)
    before = probabilities.cumsum(0) - probabilities  # of the likelier tokens
    nucleus = probabilities * (before < top_p)
    return int(order[torch.multinomial(nucleus, 1, generator=generator)])
