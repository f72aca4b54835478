"""Encoders, which convert pieces of a corpus to the tokens in shards."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megasparse.data.index_file import Width
from megasparse.data.tokenizers import build_tokenizer
from megasparse.data.tokenizers.simple import ByteTokenizer
from megasparse.errors import ConfigError


class Encoded(NamedTuple):
    """Tokens of a piece, and the size of its text."""

    tokens: np.ndarray
    """(length,) uint8, uint16 or uint32, of the encoder's width."""
    raw_bytes: int
    """Bytes of the text, or of the pixels."""
    words: int
    """Reference words, for word perplexities; 0 if the corpus defines none."""


class PieceEncoder(ABC):
    """Convert pieces to tokens, in several processes. It is pickled; each process builds large parts again."""

    name: str
    """The tokenizer's kind, as in index.json."""
    sha256: str
    """The tokenizer's, as in index.json."""
    width: Width = 1
    """Bytes per token."""
    end: int | None = None
    """The token put after each document; None puts none."""
    record: int | None = None
    """Tokens of a record, if every sequence must be one (an image, a pair); samples then hold whole records."""
    file: Path | None = None
    """The tokenizer's file, which is copied next to the shards as tokenizer.SUFFIX."""

    @abstractmethod
    def encode(self, piece: bytes) -> Encoded:
        """Return the tokens of a piece, a pure function of it. Raises UserError for an invalid piece."""

    def item(self, piece: bytes) -> Encoded:
        """Return the tokens of a piece; of an empty one, the end of a document."""
        return self.encode(piece) if piece else Encoded(np.array([self.end], dtype=f"<u{self.width}"), 0, 0)


class RecordEncoder(PieceEncoder):
    """Pieces that are records of bytes already, with the meaning of the tokenizer `bytes`."""

    name, sha256 = ByteTokenizer.name, ByteTokenizer.sha256

    def __init__(self, record: int):
        self.record = record

    def encode(self, piece: bytes) -> Encoded:
        return Encoded(np.frombuffer(piece, dtype=np.uint8), len(piece), 0)


class TextEncoder(PieceEncoder):
    """Text to tokens. Pickled, it is the tokenizer's name or file, read again.

    Args:
        tokenizer: `bytes`, or a tokenizer's file.
        documents: a separator is put after each document.
        line_ends: count the end of a line as a reference word.

    Raises:
        ConfigError: the tokenizer does not exist, or lacks the separator that `documents` requires.
    """

    def __init__(self, tokenizer: str, documents: bool = False, line_ends: bool = False):
        try:
            self.tokenizer = build_tokenizer(tokenizer)
        except ConfigError as error:
            raise ConfigError("--tokenizer", error.problem, error.hint) from None
        self._arguments: tuple[Any, ...] = (tokenizer, documents, line_ends)
        self.name, self.sha256, self.file = self.tokenizer.name, self.tokenizer.sha256, self.tokenizer.file
        self.end = self.tokenizer.separator if documents else None
        if documents and self.end is None:
            raise ConfigError("--tokenizer", f'"{tokenizer}" has no token that ends a document', "Take another one")
        self.line_ends = line_ends
        self.width = width_for(max(self.tokenizer.vocabulary - 1, self.end or 0))

    def __reduce__(self) -> tuple[type["TextEncoder"], tuple[Any, ...]]:
        return type(self), self._arguments

    def encode(self, piece: bytes) -> Encoded:
        """Encode a text. Its words are separated by Unicode white space; bytes that are not UTF-8 are ignored."""
        words = len(piece.decode(errors="replace").split()) + (piece.count(b"\n") if self.line_ends else 0)
        return Encoded(np.array(self.tokenizer.ids(piece), dtype=f"<u{self.width}"), len(piece), words)


class PaddedEncoder(TextEncoder):
    """Padded records of text with special tokens. Raises ConfigError for a tokenizer without them."""

    record: int

    def __init__(self, tokenizer: str):
        super().__init__(tokenizer)
        special = self.tokenizer.special
        if special is None:
            raise ConfigError("--tokenizer", f'"{tokenizer}" has no special tokens', "Take one that has, as bytes")
        self.special = special
        self.width = width_for(max(self.tokenizer.vocabulary - 1, *special))

    def ids(self, text: str) -> np.ndarray:
        return self.tokenizer.encode(text).numpy()

    def padded(self, parts: Sequence[np.ndarray | int], length: int) -> np.ndarray:
        """Return parts of a record one after another and padding, (length,) of the encoder's width."""
        tokens = np.concatenate([np.atleast_1d(part) for part in parts])
        record = np.full(length, self.special.padding, dtype=f"<u{self.width}")
        record[: len(tokens)] = tokens
        return record

    def joined(self, records: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype=f"<u{self.width}"), *records])


def width_for(largest: int) -> Width:
    """Return the bytes that hold every id up to `largest`."""
    return 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4
