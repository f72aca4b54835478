"""The tokens of a split as a stream of bytes that can be taken up again at a place."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated

import numpy as np
from pydantic import Field

from megasparse.data.corpora.source import Document
from megasparse.data.encoding import Encoded, Encoder
from megasparse.data.index_file import Entry
from megasparse.data.workers import Workers

Number = Annotated[int, Field(ge=0)]


class StreamPosition(Entry):
    """A place between two tokens of a split. An item is a piece, or the token at the end of a document."""

    item: Number = 0
    """Items before the one that the next token is of."""
    token: Number = 0
    """Tokens of that one before it."""
    raw_bytes: Number = 0
    """Bytes of text of the items before."""
    words: Number = 0


class TokenStream:
    """`read(n)` over the tokens from a place on; the items before it are passed over, not encoded."""

    def __init__(
        self, documents: Iterable[Document], encoder: Encoder, workers: Workers[Encoded], start: StreamPosition
    ):
        items = islice(_items(documents, encoder.end is not None), start.item, None)
        self._encoded = _encode(items, encoder, workers)
        self.width = encoder.width
        self._before = start.model_copy(update={"token": 0})
        self._current: Encoded | None = None
        self._bytes, self._offset = b"", 0
        if start.token:
            self._advance()
            self._offset = start.token * self.width

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end."""
        parts, missing = [], size
        while missing and (self._offset < len(self._bytes) or self._advance()):
            parts.append(self._bytes[self._offset : self._offset + missing])
            self._offset += len(parts[-1])
            missing -= len(parts[-1])
        return b"".join(parts)

    @property
    def place(self) -> StreamPosition:
        """The position of the next token."""
        if self._offset == len(self._bytes):
            return self._behind()
        return self._before.model_copy(update={"token": self._offset // self.width})

    def _behind(self) -> StreamPosition:
        """The place behind the current item."""
        if self._current is None:
            return self._before
        _, raw_bytes, words = self._current
        was = self._before
        return StreamPosition(item=was.item + 1, raw_bytes=was.raw_bytes + raw_bytes, words=was.words + words)

    def _advance(self) -> bool:
        self._before = self._behind()
        self._current = next(self._encoded, None)
        self._bytes = self._current.tokens.tobytes() if self._current else b""
        self._offset = 0
        return self._current is not None


def _items(documents: Iterable[Document], ends: bool) -> Iterator[bytes | None]:
    """The pieces that are not empty; with `ends`, None after each document that has any."""
    for document in documents:
        some = False
        for piece in filter(None, document):
            some = True
            yield piece
        if some and ends:
            yield None


def _encode(items: Iterable[bytes | None], encoder: Encoder, workers: Workers[Encoded]) -> Iterator[Encoded]:
    is_end: deque[bool] = deque()  # of the items that are with the workers

    def pieces() -> Iterator[bytes]:
        for item in items:
            is_end.append(item is None)
            if item is not None:
                yield item

    end = Encoded(np.array([encoder.end or 0], dtype=f"<u{encoder.width}"), 0, 0)
    for encoded in workers.map(pieces()):
        while is_end.popleft():
            yield end
        yield encoded
    yield from (end for _ in is_end)
