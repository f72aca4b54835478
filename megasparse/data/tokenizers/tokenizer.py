"""The base class of tokenizers, and helpers for their files."""

import codecs
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megasparse.errors import ConfigError
from megasparse.files import read_file

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 1 << 26  # of a file; 250,000 tokens take 20 million
NAMED = ("bytes", "pixels")
"""Tokenizers that need no file."""


class SpecialTokens(NamedTuple):
    """Ids that occur in no text."""

    begin: int
    """First of a sequence of segments (BERT's [CLS])."""
    separator: int
    """After each segment (BERT's [SEP])."""
    padding: int
    mask: int


class Tokenizer(ABC):
    """Text to token ids and back."""

    name: str
    vocabulary: int
    """Ids of text are below this; `special` ones may be above (bytes) or among them."""
    sha256: str
    """Identifies the meaning of the tokens; an index with another one is rejected."""
    lossless: bool = True
    """True if any bytes come back unchanged from their tokens."""
    separator: int | None = None
    """Id of the token after each document of a corpus of documents, if any."""
    special: SpecialTokens | None = None
    file: Path | None = None

    @property
    def identity(self) -> dict[str, str]:
        return {"name": self.name, "sha256": self.sha256}

    def read(self, file: Path) -> bytes:
        """Read the file that identifies the tokenizer. Raises ConfigError, also for one of more than MOST_BYTES."""
        try:
            data = read_file(file, MOST_BYTES)
        except OSError as error:
            hint = "Give the path of a tokenizer's file; tokenizers/README.md says how one is made"
            raise ConfigError("data.tokenizer", f"{file} cannot be read ({error.strerror or error})", hint) from None
        self.file, self.sha256 = file, hashlib.sha256(self.name.encode() + b"\0" + data).hexdigest()
        return data

    def encode(self, text: str | bytes) -> "Tensor":
        """Tokens of a text: int64 (length,). A str is taken as UTF-8; lone surrogates are kept ("surrogatepass")."""
        import torch

        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return torch.from_numpy(np.array(self.ids(raw), dtype=np.int64))

    @abstractmethod
    def ids(self, text: bytes) -> Sequence[int] | np.ndarray:
        """Return the tokens of a text, not necessarily UTF-8."""

    @abstractmethod
    def pieces(self, tokens: Iterable[int]) -> Iterator[bytes]:
        """Yield the bytes each token adds to a text, none for special ones. Raises ValueError for another number."""

    def decode(self, tokens: "Tensor") -> bytes:
        """Return the bytes of tokens (length,). Raises ValueError for another number."""
        return b"".join(self.pieces(tokens.tolist()))

    def text(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield text once its characters are complete; bytes that are not UTF-8 become U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for piece in self.pieces(tokens):
            if text := decoder.decode(piece):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text

    def word_starts(self) -> "Tensor":
        """Return a mask of the ids that start a word: bool (highest id + 1,)."""
        import torch

        return torch.tensor(self.starts())

    @abstractmethod
    def starts(self) -> list[bool]:
        """Return the values of `word_starts`."""


def words_of(tokenizer: Tokenizer) -> list[str]:
    """Return the word of each token, "" for special ones and for pieces within a word."""
    starts = tokenizer.starts()[: tokenizer.vocabulary]
    return ["".join(tokenizer.text([token])).strip() if start else "" for token, start in enumerate(starts)]


# Files, and their special tokens, found by their usual names

BEGIN = ("[CLS]", "<s>", "<cls>")
SEPARATOR = ("[SEP]", "</s>", "<sep>", "<|endoftext|>", "<|end_of_text|>")
PADDING = ("[PAD]", "<pad>")
MASK = ("[MASK]", "<mask>")
USUAL = (BEGIN, SEPARATOR, PADDING, MASK)


def damaged(path: Path, problem: str, hint: str) -> ConfigError:
    return ConfigError("data.tokenizer", f"{path}: {' '.join(problem.split())}", hint)


def special_tokens(find: Callable[[str], int | None]) -> tuple[SpecialTokens | None, int | None]:
    """Return the special tokens, if all four exist, and the documents' separator. find: maps names to ids."""
    ids = [next((token for name in names if (token := find(name)) is not None), None) for names in USUAL]
    begin, separator, padding, mask = ids
    if begin is None or separator is None or padding is None or mask is None:
        return None, separator
    return SpecialTokens(begin, separator, padding, mask), separator
