"""Text as documents of sentences: where documents end in files, and sentences in lines.

What is handed on is text whose documents stand apart by an empty line; a sentence ends at the latest with its line.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megasparse.data.corpora.cutting import PIECE, text_pieces
from megasparse.data.corpora.source import Part, Source
from megasparse.data.workers import grouped

ENDS = ("empty-lines", "files", "doc-tags")
"""Ways to end a document besides its file: an empty line (a sentence a line, as BookCorpus comes); nothing (empty lines
are paragraphs'); or the lines <doc ...> and </doc> of WikiExtractor."""
_TAG = re.compile(rb"</?doc\b[^>]*>\s*\Z")
_END = re.compile(r"""([.!?…]+)["'”’»)\]]*\s+(?=["'“‘«(\[]*(\w))""")
_NO_END = re.compile(r"\b([^\W\d_]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e)\Z")


class DocumentSpan(NamedTuple):
    """A document, or a part of up to 1 MiB of one that is longer."""

    start: int
    """Byte of the source at which the document starts."""
    text: bytes
    """Its lines that are not empty, and an empty one."""


def text_documents(source: Source, ends: str) -> Iterator[DocumentSpan]:
    """All documents in turn. ends: one of ENDS."""
    start = 0
    for part in source.parts:
        yield from _documents(part, start, ends)
        start += part.size


def packed(documents: Iterable[DocumentSpan]) -> Iterator[bytes]:
    """Join as many documents to a piece as fit 1 MiB."""
    return map(b"".join, grouped((document.text for document in documents), PIECE))


def _documents(part: Part, position: int, ends: str) -> Iterator[DocumentSpan]:
    """The documents of one file, whose first byte is at `position` of the source."""
    lines: list[bytes] = []
    size, start = 0, -1
    for line in _lines(part):
        text = line.strip()
        border = not text if ends == "empty-lines" else ends == "doc-tags" and _TAG.match(text) is not None
        if lines and (border or size + len(text) + 2 > PIECE):
            yield DocumentSpan(start, b"\n".join([*lines, b"", b""]))
            lines, size = [], 0
        if border:
            start = -1
        elif text:
            start = position if start < 0 else start
            lines.append(text)
            size += len(text) + 1
        position += len(line)
    if lines:
        yield DocumentSpan(start, b"\n".join([*lines, b"", b""]))


def _lines(part: Part) -> Iterator[bytes]:
    for piece in text_pieces(part.pieces()):
        yield from piece.splitlines(keepends=True)


def sentences(line: str) -> list[str]:
    """The sentences of a line: each ends with . ! ? or …, quotes and brackets behind it, and white space, where what
    comes next begins with no small letter; not behind a single letter or a usual abbreviation.
    """
    found, start = [], 0
    for end in _END.finditer(line):
        if end[2].islower() or (end[1] == "." and _NO_END.search(line, 0, end.start())):
            continue
        found.append(line[start : end.end()].rstrip())
        start = end.end()
    return [*found, line[start:].rstrip()] if line[start:].strip() else found


def documents(text: bytes) -> Iterator[list[str]]:
    """The sentences of each document of a piece's text."""
    for document in text.decode().split("\n\n"):
        if found := [sentence for line in document.split("\n") for sentence in sentences(line)]:
            yield found
