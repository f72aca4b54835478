"""Pairs of consecutive segments of text, for encoders that predict masked tokens and sentence order (ALBERT).

A record of L tokens is [begin] A [separator] B [separator] and padding; A and B are runs of whole sentences that follow
each other in one document, in order, with a border of sentences, at random, between them. Every tenth record is made
for a random shorter length. How many sentences a record has depends on none of their places: where records are filled
until the next sentence does not fit, or segments are cut to the record's length as ALBERT's are, lengths and cuts give
away which segment came first, and order can be predicted without reading (62 % of movie reviews' pairs of 128 tokens by
sentence lengths alone).
"""

import argparse
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from megasparse.data.corpora.cutting import add_split_argument, split_at, split_sizes
from megasparse.data.corpora.padded import PaddedEncoder
from megasparse.data.corpora.sentences import ENDS, documents, packed, text_documents
from megasparse.data.corpora.source import Document, Source, add_source_arguments, add_tokenizer_argument, positive
from megasparse.data.encoding import Encoded
from megasparse.errors import ConfigError, DataError

HELP = "pairs of text segments, for masked tokens and sentence order"
EXAMPLE = "--source books/ --tokenizer tokenizers/bert.json --length 512 --output data/pairs"
FILES = True
SHORTER = 0.1
"""Part of the records that are made for a random length."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    add_tokenizer_argument(parser)
    add_split_argument(parser)
    parser.add_argument(
        "--length", type=positive, default=512, metavar="TOKENS", help="of a record (default: %(default)s)"
    )
    parser.add_argument(
        "--documents",
        choices=ENDS,
        default=ENDS[0],
        help="what ends a document within a file (default: %(default)s); a file ends one in any case",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the cutting (default: %(default)s)")


def encoder(settings: Mapping[str, Any]) -> "PairEncoder":
    return PairEncoder(settings["tokenizer"], settings["length"], settings["seed"])


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]:
    """A document belongs to the split that its first byte lies in. Raises ConfigError for a bad --split, DataError for
    text that is not UTF-8, and for a split that gets no document.
    """
    source.require_text()
    return _splits(source, split_sizes(settings["split"], source.total_bytes), settings)


def _splits(
    source: Source, sizes: Mapping[str, int], settings: Mapping[str, Any]
) -> Iterator[tuple[str, Iterable[Document]]]:
    missing = dict.fromkeys(sizes)
    spans = text_documents(source, settings["documents"])
    for name, group in groupby(spans, key=lambda document: split_at(document.start, sizes)):
        del missing[name]
        yield name, [packed(group)]
    if missing:
        hint = "Give more text, another --split, or check --documents"
        raise DataError(source.name, f"no document begins in the part that is for {next(iter(missing))}", hint)


class PairEncoder(PaddedEncoder):
    """Pieces of documents to records. Each sentence is read with a space before it."""

    def __init__(self, tokenizer: str, length: int, seed: int):
        """Raises ConfigError for a tokenizer without special tokens, a length that holds no pair, a negative seed."""
        super().__init__(tokenizer)
        self._arguments = (tokenizer, length, seed)
        self.record, self.seed = length, seed
        if length < 5:
            raise ConfigError("--length", f"{length} tokens hold no pair of segments", "Give 5 or more, such as 512")
        if seed < 0:
            raise ConfigError("--seed", f"{seed} is negative", "Give 0 or more")

    def encode(self, piece: bytes) -> Encoded:
        """Encode documents as sentences.py separates them, each cut by draws of (seed, its text)."""
        begin, separator, _, _ = self.special
        records = []
        for document in documents(piece):
            sentences = [ids for sentence in document if len(ids := self.ids(f" {sentence}"))]
            for first, second in segments(sentences, self.record - 3, Words(self.seed, "\n".join(document))):
                records.append(self.padded([begin, first, separator, second, separator], self.record))
        return Encoded(self.joined(records), len(piece), len(piece.decode().split()))


class Words:
    """Random numbers of raw Philox words, which numpy promises to stay the same, that depend on seed and text."""

    def __init__(self, seed: int, text: str):
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), dtype="<u4")
        self._philox = np.random.Philox(np.random.SeedSequence([seed, *digest.tolist()]))

    def below(self, n: int) -> int:
        return int(self._philox.random_raw()) * n >> 64


def segments(sentences: Sequence[np.ndarray], room: int, words: Words) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Segments A and B of the records of a document, of up to `room` tokens together.

    sentences: the tokens of each. As many at a time as would fill the record if they were of the document's mean
    length; of too many one is left out on either side, by a coin, until they fit.
    """
    start, mean = 0, sum(map(len, sentences)) / max(1, len(sentences))
    while start < len(sentences):
        stop = start + max(2, round(_target(room, words) / mean))
        chunk = list(sentences[start:stop])
        while sum(map(len, chunk)) > room:
            chunk.pop(-words.below(2))
        if len(chunk) > 1:
            border = 1 + words.below(len(chunk) - 1)
            yield np.concatenate(chunk[:border]), np.concatenate(chunk[border:])
        start = stop


def _target(room: int, words: Words) -> int:
    return 2 + words.below(room - 1) if words.below(1000) < 1000 * SHORTER else room
