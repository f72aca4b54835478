"""A sum of nats in the units that papers compare.

    bits a token (bits/dim) = nats / (ln 2 · tokens)        token perplexity = exp(nats / tokens)
    bits/byte = nats / (ln 2 · bytes of the text)           word perplexity = exp(nats / reference words of the text)

Tokens are the model's own, bytes and words the text's: only the lower two compare models of different tokenizers. A
word perplexity is 2^(bits/byte · bytes a word), whatever the tokens.
"""

import math
from dataclasses import dataclass

from megasparse.evaluation.protocol import Protocol

BYTES, PIXELS = "bytes", "pixels"
"""Tokenizers whose tokens are what bits/dim is counted in."""


@dataclass(frozen=True)
class Counts:
    """What a sum of nats is a sum over: scored tokens, and the bytes and reference words that they stand for."""

    tokens: int
    raw_bytes: int | None
    words: int | None
    missing: str = "nothing"
    """Why a count is None."""


def counts_of(protocol: Protocol, scored: int, tokens: int) -> Counts:
    """The counts of `scored` of a split's `tokens`. Bytes and words of a part are known only where tokens are bytes."""
    if scored == tokens:
        own = tokens if protocol.tokenizer["name"] == BYTES else None
        raw_bytes = own if protocol.split_bytes is None else protocol.split_bytes
        return Counts(scored, raw_bytes or None, protocol.split_words or None, "the index of the data does not have it")
    part = f"known only of the whole split, of which {scored:,} of {tokens:,} tokens were scored"
    return Counts(scored, scored if protocol.tokenizer["name"] == BYTES else None, None, part)


def measures(nats: float, counts: Counts, tokenizer: str) -> dict[str, float | None]:
    """The measures usual for a text's tokens, the primary one first; None for those whose count is not known."""
    of_token, of_byte = bits(nats, counts.tokens), bits(nats, counts.raw_bytes)
    of_word = perplexity(nats, counts.words)
    if tokenizer == PIXELS:
        return {"bits_per_dim": of_token}
    if tokenizer == BYTES:
        return {"bits_per_dim": of_token, "bits_per_byte": of_byte, "word_perplexity": of_word}
    return {
        "bits_per_token": of_token,
        "bits_per_byte": of_byte,
        "token_perplexity": perplexity(nats, counts.tokens),
        "word_perplexity": of_word,
    }


def bits(nats: float, count: int | None) -> float | None:
    return None if count is None else nats / (math.log(2.0) * count)


LARGEST = 700.0  # exp of more is no float64


def perplexity(nats: float, count: int | None) -> float | None:
    """None also where it is beyond the numbers: text of almost no words."""
    return None if count is None or nats > LARGEST * count else math.exp(nats / count)
