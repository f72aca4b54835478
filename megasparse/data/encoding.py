"""Encoders, which make the tokens in shards of a corpus' pieces."""

from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np


class Encoded(NamedTuple):
    """The tokens of a piece, and what they stand for."""

    tokens: np.ndarray
    """(length,) uint8, uint16 or uint32, of the encoder's width."""
    raw_bytes: int
    """Bytes of the text, or of the pixels."""
    words: int
    """Reference words, by which a word perplexity is counted; 0 where the corpus has none."""


class Encoder(Protocol):
    """Pickled to the worker processes: what is large is built anew there."""

    @property
    def name(self) -> str:
        """The tokenizer's kind, as in index.json."""

    @property
    def sha256(self) -> str:
        """The tokenizer's, as in index.json."""

    @property
    def width(self) -> Literal[1, 2, 4]:
        """Bytes a token."""

    @property
    def end(self) -> int | None:
        """The token put after each document; None puts none."""

    @property
    def record(self) -> int | None:
        """Tokens of a record, where every sequence must be one (an image, a pair); samples then hold whole records."""

    @property
    def file(self) -> Path | None:
        """The tokenizer's file, which is copied beside the shards as tokenizer.SUFFIX."""

    def encode(self, piece: bytes) -> Encoded:
        """A function of the piece alone. Raises a UserError that names what is wrong with it, and where."""


class RecordEncoder:
    """Pieces that are records of bytes already, with the meaning of the tokenizer `bytes`."""

    end = None
    file = None
    width: Literal[1] = 1

    def __init__(self, name: str, sha256: str, record: int):
        self.name, self.sha256, self.record = name, sha256, record

    def encode(self, piece: bytes) -> Encoded:
        return Encoded(np.frombuffer(piece, dtype=np.uint8), len(piece), 0)
