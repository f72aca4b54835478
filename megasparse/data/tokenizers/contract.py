"""The interface of tokenizers."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

WHITE_SPACE = b" \t\n\r\v\f"


class SpecialTokens(NamedTuple):
    """Ids that no text has."""

    begin: int
    """First of a sequence of segments (BERT's [CLS])."""
    separator: int
    """After each segment (BERT's [SEP])."""
    padding: int
    mask: int


class Tokenizer(ABC):
    """Text to token ids and back. Pickled by its worker processes, it is built anew from its name or file."""

    name: str
    """Its kind."""
    vocabulary: int
    """Ids that text can have are below this; `special` ones may lie above (bytes) or among them."""
    sha256: str
    """Identifies what the tokens mean; an index made under another meaning is refused."""
    lossless: bool = True
    """Whether any bytes come back unchanged from their tokens."""
    separator: int | None = None
    """Id of the token after each document of a corpus of documents; None where there is none."""
    special: SpecialTokens | None = None
    file: Path | None = None
    """The file that it was read from."""

    @abstractmethod
    def encode(self, text: str | bytes) -> Tensor:
        """Tokens of a text: int64 (length,). A str is taken as UTF-8; lone surrogates are kept ("surrogatepass")."""

    @abstractmethod
    def pieces(self, tokens: Iterable[int]) -> Iterator[bytes]:
        """The bytes each token adds to a text, none for special ones. Raises ValueError where a number is no token."""

    def decode(self, tokens: Tensor) -> bytes:
        """Bytes of tokens (length,). Raises ValueError for a number that is no token."""
        return b"".join(self.pieces(tokens.tolist()))

    def text(self, tokens: Iterable[int]) -> Iterator[str]:
        """Tokens as text, as soon as each character is whole; what is no UTF-8 becomes U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for piece in self.pieces(tokens):
            if text := decoder.decode(piece):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text

    @abstractmethod
    def word_starts(self) -> Tensor:
        """Whether a token of each id begins a word: bool (highest id + 1,)."""


def words_of(tokenizer: Tokenizer) -> list[str]:
    """The word that each token is, "" of one that is none: special, or a piece that a word does not begin with."""
    starts = tokenizer.word_starts().tolist()[: tokenizer.vocabulary]
    return ["".join(tokenizer.text([token])).strip() if start else "" for token, start in enumerate(starts)]


def utf8(text: str | bytes) -> bytes:
    """A text's bytes, as `Tokenizer.encode` takes them."""
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
