"""Text generation: continuations of a prompt, or targets of an encoder–decoder for source texts of S tokens."""

import itertools
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megasparse.config.schema import Config
from megasparse.data.tokenizers import Tokenizer
from megasparse.errors import ConfigError, DataError
from megasparse.evaluation.generate import (
    BeamSettings,
    Sampling,
    check_beams,
    check_length,
    end_tokens,
    generate,
    search,
)
from megasparse.files import read_file

DECODER_TOKENS = 200
"""Default number of new tokens of a decoder; an encoder–decoder writes until its end token."""
AT_ONCE = 8
"""Sources per batch of a beam search."""


@dataclass(frozen=True)
class Request:
    prompt: bytes
    """Start of the text, not necessarily UTF-8."""
    tokens: int | None
    sampling: Sampling
    beams: int | None
    length_penalty: float


class EncodedSource:
    """An encoder–decoder with encoded sources (B, S), with a decoder's interface."""

    def __init__(self, model: Any, sources: Tensor, hash_seed: int):
        self.model, self.memory = model, model.encode(sources, hash_seed)
        self.prefill, self.decode = model.prefill, model.decode

    def new_cache(self, batch: int, seed: int) -> Any:
        return self.model.new_cache(batch, seed, memory=self.memory)


def read_sources(text: str | None, file: str | None) -> list[bytes]:
    """Return the source text, or the lines of a file. Raises DataError if the file is unreadable or empty."""
    if file is None:
        return [] if text is None else [text.encode("utf-8", "surrogateescape")]
    with DataError.instead_of(OSError, file, "cannot be read: {}", "Give a file with one source per line"):
        content = read_file(file)
    if not content:
        raise DataError(file, "the file is empty", "Give a file with one source per line")
    return [line.removesuffix(b"\r") for line in content.removesuffix(b"\n").split(b"\n")]


def texts(
    model: Any, config: Config, tokenizer: Tokenizer, request: Request, sources: Sequence[bytes], device: torch.device
) -> Iterable[Iterator[str]]:
    """Return an iterator of text pieces per source, or one for a decoder. Raises ConfigError for an unsupported
    request, before any text is generated.
    """
    if tokenizer.name == "pixels":
        raise ConfigError("--checkpoint", "the model predicts pixels, not text", "Use --images N or --complete IMAGE")
    request.sampling.check()
    check_beams(1 if request.beams is None else request.beams, request.length_penalty)
    for name, value in (asdict(request.sampling) | {"length_penalty": request.length_penalty}).items():
        if (request.beams is None) == (name == "length_penalty") and value != getattr(Sampling, name, 0.0):
            problem = f"{value} is ignored {'without' if request.beams is None else 'with'} --beams"
            raise ConfigError(f"--{name.replace('_', '-')}", problem, "Choose sampling or beam search")
    if config.model.source is None:
        separator, ends = config.model.document_separator, end_tokens(config, tokenizer)
    else:
        separator = _separator(tokenizer, config)
        ends = frozenset([separator])
    prompt = tokenizer.encode(request.prompt)
    if separator is not None and separator in prompt:  # an imported model's other ends may be part of a chat
        raise ConfigError("--prompt", f"it contains the token that ends a text ({separator})", "Remove this token")
    tokens, room = request.tokens, max(0, config.model.max_length - len(prompt))
    if tokens is None:
        tokens = min(DECODER_TOKENS, room) if config.model.source is None else room
    check_length(len(prompt), tokens, config.model.max_length)
    writer = _Writer(tokenizer, request, tokens, config.run.seed, ends)
    if config.model.source is None:
        if sources:
            raise ConfigError("--source", "a decoder does not read a source", "Give a --prompt to continue instead")
        return [writer.text(model, prompt.to(device))]
    if not sources:
        raise ConfigError(
            "--source",
            "it is missing, but an encoder-decoder needs a source",
            "Give --source TEXT or --source-file FILE",
        )
    read = list[Tensor]()
    for number, text in enumerate(sources, 1):
        read.append(torch.cat([tokenizer.encode(text), torch.tensor([separator])]))
        if len(read[-1]) > config.model.source.length:
            problem = f"number {number} is {len(read[-1])} tokens long, with its end token"
            raise ConfigError("--source", problem, f"Shorten it to model.source.length = {config.model.source.length}")
    return writer.of_sources(model, read, prompt.to(device), config.model.padding_token)


@dataclass(frozen=True)
class _Writer:
    tokenizer: Tokenizer
    request: Request
    tokens: int
    hash_seed: int
    ends: Set[int]

    def text(self, decoder: Any, prompt: Tensor) -> Iterator[str]:
        """Yield pieces of the prompt and its continuation."""
        if self.request.beams is None:
            options: dict[str, Any] = {"hash_seed": self.hash_seed, "vocabulary": self.tokenizer.vocabulary}
            tokens = generate(decoder, prompt, self.tokens, ends=self.ends, **options, **asdict(self.request.sampling))
            return self.tokenizer.text(itertools.chain(prompt.tolist(), tokens))
        (text,) = self._searched(decoder, prompt[None])
        return text

    def of_sources(
        self, model: Any, sources: Sequence[Tensor], prompt: Tensor, padding: int | None
    ) -> Iterator[Iterator[str]]:
        """Yield the text of each source. Beam searches run in batches."""
        if self.request.beams is None or padding is None:
            for source in sources:
                yield self.text(EncodedSource(model, source[None].to(prompt.device), self.hash_seed), prompt)
            return
        for first in range(0, len(sources), AT_ONCE):
            group = pad_sequence(list(sources[first : first + AT_ONCE]), batch_first=True, padding_value=padding)
            decoder = EncodedSource(model, group.to(prompt.device), self.hash_seed)
            yield from self._searched(decoder, prompt.expand(len(group), -1))

    def _searched(self, decoder: Any, prompts: Tensor) -> list[Iterator[str]]:
        assert self.request.beams is not None
        width, alpha = self.tokenizer.vocabulary, self.request.length_penalty
        settings = BeamSettings(self.request.beams, self.tokens, self.ends, alpha, width)
        best = [hypotheses[0].tokens for hypotheses in search(decoder, prompts, self.hash_seed, settings)]
        return [self.tokenizer.text([*prompt, *tokens]) for prompt, tokens in zip(prompts.tolist(), best, strict=True)]


def _separator(tokenizer: Tokenizer, config: Config) -> int:
    if tokenizer.special is None:
        raise ConfigError(
            "data.tokenizer", f'"{tokenizer.name}" does not define special tokens', "Give that of the training data"
        )
    separator, vocabulary = tokenizer.special.separator, config.model.vocabulary
    if separator >= vocabulary:
        raise ConfigError(
            "model.vocabulary",
            f"{vocabulary} does not include the end token ({separator})",
            "Train on pairs of texts with it",
        )
    return separator
