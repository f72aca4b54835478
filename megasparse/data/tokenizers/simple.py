"""Tokens that are bytes of a text or of an image's pixels, and tokens that are whole words."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from megasparse.data.tokenizers.tokenizer import SpecialTokens, Tokenizer, damaged

UNKNOWN, END = "<unk>", "<eos>"
HINT = "Make it again with megasparse train-tokenizer words"


class ByteTokenizer(Tokenizer):
    """Token i is the byte i, for any bytes."""

    name = "bytes"
    vocabulary = 256
    sha256 = hashlib.sha256(b"token i is the byte i, for i in 0..255").hexdigest()
    separator: int | None = 0
    special: SpecialTokens | None = SpecialTokens(begin=258, separator=259, padding=257, mask=256)

    def ids(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def pieces(self, tokens: Iterable[int]) -> Iterator[bytes]:
        return (bytes([token]) for token in tokens)

    def starts(self) -> list[bool]:
        return [token < 256 and bytes([token]).isspace() for token in range(260)]


class PixelTokenizer(ByteTokenizer):
    """Token i is the value i of a sub-pixel: rows from the top, pixels from the left, red, green and blue in turn."""

    name = "pixels"
    sha256 = hashlib.sha256(b"token i is the sub-pixel value i: rows, columns, channels").hexdigest()
    separator = None
    special = None


class WordTokenizer(Tokenizer):
    """Token i is the word in line i of a file, most frequent first, so that a range of ids is a range of frequencies.

    A text is split at white space, each line's end is `<eos>`, and an unknown word `<unk>`. It does not come back as it
    was: white space becomes one space, and what is no UTF-8 U+FFFD.
    """

    name = "words"
    lossless = False

    def __init__(self, file: Path):
        """Raise ConfigError with the line for an invalid file."""
        self._ids = _parse(file, self.read(file))
        self.words = list(self._ids)
        self.vocabulary = len(self.words)
        self._unknown, self.end = self._ids[UNKNOWN], self._ids[END]

    def ids(self, text: bytes) -> list[int]:
        ids, unknown, tokens = self._ids, self._unknown, list[int]()
        for line in text.decode("utf-8", "replace").split("\n"):
            tokens += [ids.get(word, unknown) for word in line.split()]
            tokens.append(self.end)
        tokens.pop()  # no line ends behind the last one
        return tokens

    def pieces(self, tokens: Iterable[int]) -> Iterator[bytes]:
        """Yield each word, with a space before it unless it is the first of its line."""
        space = ""
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise ValueError(f"{token} is no token of {self.vocabulary} words")
            if token == self.end:
                space = ""
                yield b"\n"
            else:
                yield (space + self.words[token]).encode()
                space = " "

    def starts(self) -> list[bool]:
        return [True] * self.vocabulary


def vocabulary_file(pieces: Iterable[bytes], size: int | None = None) -> bytes:
    """Return a file of the words of a training text, by frequency, then by code points.

    pieces: of UTF-8, cut anywhere. size: of the vocabulary at most; other words count as `<unk>`. Raises
    UnicodeDecodeError.
    """
    counts: Counter[str] = Counter({UNKNOWN: 0, END: 0})
    rest = b""
    for piece in pieces:
        whole, newline, rest = (rest + piece).rpartition(b"\n")
        lines = (whole + newline).decode()
        counts.update(lines.split())
        counts[END] += lines.count("\n")
    counts.update(rest.decode().split())

    def ranked(words: Iterable[str]) -> list[str]:
        return sorted(words, key=lambda word: (-counts[word], word))

    others = ranked(counts.keys() - {UNKNOWN, END})
    frequent = others if size is None else others[: size - 2]
    counts[UNKNOWN] += sum(counts[word] for word in others[len(frequent) :])
    return "".join(f"{word}\n" for word in ranked([*frequent, UNKNOWN, END])).encode()


def _parse(file: Path, data: bytes) -> dict[str, int]:
    try:
        words = data.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise damaged(file, f"line {line} is not UTF-8", HINT) from None
    ids: dict[str, int] = {}
    for token, word in enumerate(words):
        if word.split() != [word] or ids.setdefault(word, token) < token:
            raise damaged(file, f"line {token + 1}, {word[:40]!r}, is not a word, or is one of an earlier line", HINT)
    for word in (UNKNOWN, END):
        if word not in ids:
            raise damaged(file, f"has no word {word}", HINT)
    return ids
