"""BookCorpus (Zhu et al. 2015) and text files like it: a sentence a line, an empty line or a file's end between books.

Lines stay as they are; empty ones go, and after each book stands the tokenizer's separator. A book belongs to the split
that its first byte lies in. The published books_large_p1.txt and books_large_p2.txt have no empty lines: each is one
document. Nobody publishes checksums of them. Reference words: what stands between white space.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from megasparse.data.corpora.cutting import add_split_argument, split_at, split_sizes, text_pieces
from megasparse.data.corpora.source import Document, Part, Source, add_source_arguments, add_tokenizer_argument
from megasparse.data.text_encoder import TextEncoder
from megasparse.errors import DataError

HELP = "text files of a sentence a line, an empty line or a file's end between books"
EXAMPLE = "--source books_in_sentences/ --split 98,1,1 --output data/bookcorpus"
FILES = True
EMPTY_LINE = re.compile(rb"(?m)^[ \t\r\f\v]*\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    add_tokenizer_argument(parser)
    add_split_argument(parser)


def encoder(settings: Mapping[str, Any]) -> TextEncoder:
    return TextEncoder(settings.get("tokenizer", "bytes"), documents=True)


def about(source: Source, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The number of books of each split. Raises DataError for what is not UTF-8, and for a split that gets none."""
    source.require_text(zeros=settings.get("tokenizer", "bytes") != "bytes")
    sizes = split_sizes(settings["split"], source.total_bytes)
    books = Counter(split_at(start, sizes) for start, _ in groupby(_books(source), key=itemgetter(0)))
    for name in sizes:
        if not books[name]:
            problem = f"{books.total()} books are too few to give {name} any"
            hint = "Give another --split; the corpus `text` splits by byte position, also inside a book"
            raise DataError(source.name, problem, hint)
    return {"books": dict(books)}


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]:
    """The splits that are not 0 percent. Raises ConfigError for a bad --split."""
    sizes = split_sizes(settings["split"], source.total_bytes)
    for name, lines in groupby(_books(source), key=lambda part_of_book: split_at(part_of_book[0], sizes)):
        yield name, (map(itemgetter(1), book) for _, book in groupby(lines, key=itemgetter(0)))


def _books(source: Source) -> Iterator[tuple[int, bytes]]:
    """(byte of the source that a book starts at, its next lines): each book a piece or more."""
    position = 0
    for part in source.parts:
        yield from _books_of(part, position)
        position += part.size


def _books_of(part: Part, position: int) -> Iterator[tuple[int, bytes]]:
    book: int | None = None
    for piece in text_pieces(part.pieces()):
        start = 0
        for stop, behind in chain((line.span() for line in EMPTY_LINE.finditer(piece)), [(len(piece), None)]):
            if start < stop:
                book = position + start if book is None else book
                yield book, piece[start:stop]
            if behind is not None:
                book, start = None, behind
        position += len(piece)
