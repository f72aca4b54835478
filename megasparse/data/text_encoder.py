"""Pieces of text to tokens, with any tokenizer."""

from pathlib import Path
from typing import Any, Literal

from megasparse.data.encoding import Encoded
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import ConfigError

WIDTHS: tuple[Literal[1, 2, 4], ...] = (1, 2, 4)


class TextEncoder:
    """Text to tokens. Pickled, it is the tokenizer's name or file, read anew.

    documents: whether a separator is put after each document. line_ends: whether the end of a line counts as a
    reference word, beside those between white space. Raises ConfigError for a tokenizer that cannot be had, or that
    has no separator where one is wanted.
    """

    record: int | None = None

    def __init__(self, tokenizer: str, documents: bool = False, line_ends: bool = False):
        try:
            self.tokenizer = build_tokenizer(tokenizer)
        except ConfigError as error:
            raise ConfigError("--tokenizer", error.problem, error.hint) from None
        self._arguments: tuple[Any, ...] = (tokenizer, documents, line_ends)
        self.name, self.sha256 = self.tokenizer.name, self.tokenizer.sha256
        self.end = self.tokenizer.separator if documents else None
        if documents and self.end is None:
            problem = f'the tokenizer "{tokenizer}" has no token that ends a document'
            raise ConfigError("--tokenizer", problem, "Take another one: this corpus is one of documents")
        self.line_ends = line_ends
        self.width = width_for(max(self.tokenizer.vocabulary - 1, self.end or 0))

    def __reduce__(self) -> tuple[type["TextEncoder"], tuple[Any, ...]]:
        return type(self), self._arguments

    @property
    def file(self) -> Path | None:
        return self.tokenizer.file

    def encode(self, piece: bytes) -> Encoded:
        """A word is what stands between white space (of Unicode); bytes that are not UTF-8 are no white space."""
        words = len(piece.decode(errors="replace").split())
        if self.line_ends:
            words += piece.count(b"\n")
        tokens = self.tokenizer.encode(piece).numpy().astype(f"<u{self.width}")
        return Encoded(tokens, len(piece), words)


def width_for(largest: int) -> Literal[1, 2, 4]:
    """Bytes that hold every id up to `largest`."""
    return next(width for width in WIDTHS if largest < 1 << 8 * width)
