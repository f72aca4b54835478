"""Tokens that are bytes: of a text, or of an image's pixels."""

import codecs
import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megasparse.data.tokenizers.contract import SpecialTokens, Tokenizer


class ByteTokenizer(Tokenizer):
    """Token i is the byte i: any bytes go in, and come out again unchanged."""

    name = "bytes"
    vocabulary = 256
    sha256 = hashlib.sha256(b"token i is the byte i, for i in 0..255").hexdigest()
    separator: int | None = 0
    special: SpecialTokens | None = SpecialTokens(begin=258, separator=259, padding=257, mask=256)

    def encode(self, text: str | bytes) -> Tensor:
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long() if raw else torch.empty(0, dtype=torch.long)

    def decode(self, tokens: Tensor) -> bytes:
        return bytes(tokens.tolist())

    def text(self, tokens: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            if text := decoder.decode(bytes([token])):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text

    def word_starts(self) -> Tensor:
        """A word begins with the white space before it."""
        starts = torch.zeros(260, dtype=torch.bool)
        starts[list(b" \t\n\r\v\f")] = True
        return starts


class PixelTokenizer(ByteTokenizer):
    """Token i is the value i of a sub-pixel: rows from the top, pixels from the left, red, green and blue in turn."""

    name = "pixels"
    sha256 = hashlib.sha256(b"token i is the sub-pixel value i: rows, columns, channels").hexdigest()
    separator = None
    special = None
