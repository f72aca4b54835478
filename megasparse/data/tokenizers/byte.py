"""Tokens that are bytes: of a text, or of an image's pixels."""

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megasparse.data.tokenizers.contract import WHITE_SPACE, SpecialTokens, Tokenizer, utf8


class ByteTokenizer(Tokenizer):
    """Token i is the byte i: any bytes go in, and come out again unchanged."""

    name = "bytes"
    vocabulary = 256
    sha256 = hashlib.sha256(b"token i is the byte i, for i in 0..255").hexdigest()
    separator: int | None = 0
    special: SpecialTokens | None = SpecialTokens(begin=258, separator=259, padding=257, mask=256)

    def encode(self, text: str | bytes) -> Tensor:
        raw = utf8(text)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long() if raw else torch.empty(0, dtype=torch.long)

    def pieces(self, tokens: Iterable[int]) -> Iterator[bytes]:
        return (bytes([token]) for token in tokens)

    def decode(self, tokens: Tensor) -> bytes:
        return bytes(tokens.tolist())

    def word_starts(self) -> Tensor:
        """A word begins with the white space before it."""
        starts = torch.zeros(260, dtype=torch.bool)
        starts[list(WHITE_SPACE)] = True
        return starts


class PixelTokenizer(ByteTokenizer):
    """Token i is the value i of a sub-pixel: rows from the top, pixels from the left, red, green and blue in turn."""

    name = "pixels"
    sha256 = hashlib.sha256(b"token i is the sub-pixel value i: rows, columns, channels").hexdigest()
    separator = None
    special = None
