"""PG-19 (Rae et al. 2020): books of Project Gutenberg from before 1919, in folders train/, validation/ and test/.

Each file NNN.txt is a book, NNN its number there, and a document. metadata.csv (number, title, date, link), where it is
beside them, gives index.json the title and date of each book, in the order of the shards. No checksums are published:
`official` says that the numbers of books are the published ones. Reference words: what stands between white space, to
be compared with the published 1,973,136,207, 3,007,061 and 6,966,499.
"""

import argparse
import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from megasparse.data.corpora.cutting import NAMES, text_pieces
from megasparse.data.corpora.source import Document, Part, Source, add_source_arguments, add_tokenizer_argument
from megasparse.data.text_encoder import TextEncoder
from megasparse.errors import DataError

HELP = "PG-19: a book a file in train/, validation/ and test/, with metadata.csv"
EXAMPLE = "--source deepmind-gutenberg/ --output data/pg19"
FILES = True
OFFICIAL = {"train": 28_602, "validation": 50, "test": 100}
METADATA = "metadata.csv"
MOST_METADATA = 1 << 26  # bytes: the official file has 3 million
Books = dict[str, dict[int, Part]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The splits are the official ones: figures on them are comparable because everyone splits alike."""
    add_source_arguments(parser)
    add_tokenizer_argument(parser)


def encoder(settings: Mapping[str, Any]) -> TextEncoder:
    return TextEncoder(settings.get("tokenizer", "bytes"), documents=True)


def about(source: Source, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of books, and titles and dates. Raises DataError for what is not UTF-8, folders that are not PG-19's, a
    book that is there twice, and metadata that cannot be read or has none of the books.
    """
    source.require_text(zeros=settings.get("tokenizer", "bytes") != "bytes")
    books = _books(source)
    counts = {name: len(found) for name, found in books.items()}
    facts: dict[str, Any] = {"books": counts, "official": counts == OFFICIAL}
    if metadata := next((part for part in source.parts if PurePath(part.name).name == METADATA), None):
        rows = _metadata(metadata)
        known = sum(number in rows for found in books.values() for number in found)
        if not known:
            raise DataError(str(metadata), "it has none of the books", "Give the one that belongs to them")
        facts["with_metadata"] = known
        facts["titles"] = {
            name: [[number, *rows.get(number, (None, None))] for number in found] for name, found in books.items()
        }
    return facts


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]:
    """The official splits that are there, each with its books by number."""
    for name, books in _books(source).items():
        yield name, (text_pieces(part.pieces()) for part in books.values())


def _books(source: Source) -> Books:
    books: Books = {name: {} for name in NAMES}
    for part in source.parts:
        place = part.path if part.member is None else PurePath(part.member)
        if ".txt" not in place.suffixes:
            continue
        split, number = place.parent.name, place.name.partition(".")[0]
        if split not in books or not (number.isascii() and number.isdigit()):
            problem = "this is not a book of PG-19, which are train/NNN.txt, validation/NNN.txt and test/NNN.txt"
            raise DataError(str(part), problem, "Leave it out; the corpus `text` with --documents takes any files")
        for other, found in books.items():
            if int(number) in found:
                problem = f"the book {number} is in {other} as well ({found[int(number)]})"
                raise DataError(str(part), problem, "Keep one of the two")
        books[split][int(number)] = part
    if not any(books.values()):
        raise DataError(source.name, "there is no train/NNN.txt, validation/NNN.txt or test/NNN.txt", "Check --source")
    return {name: dict(sorted(found.items())) for name, found in books.items() if found}


def _metadata(part: Part) -> dict[int, tuple[str, str]]:
    """Title and date by number of the book."""
    if part.size > MOST_METADATA:
        raise DataError(str(part), f"{part.size:,} bytes are too many for metadata", "Give the official file")
    lines = b"".join(part.pieces()).decode().splitlines()
    rows: dict[int, tuple[str, str]] = {}
    try:
        for line, row in enumerate(csv.reader(lines, strict=True), 1):
            if len(row) < 3 or not row[0].strip().isdecimal():
                problem = f"row {line} is not a book's number, title and date"
                raise DataError(str(part), problem, "Give the official file, or leave it out")
            rows[int(row[0])] = (row[1], row[2])
    except csv.Error as error:
        raise DataError(str(part), f"it is not CSV: {error}", "Give the official file, or leave it out") from None
    return rows
