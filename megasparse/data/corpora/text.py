"""Any text: one file, several or a folder, one after another as they are, split by byte position.

With --documents each file is a document, with a separator after it; it belongs to the split that its first byte lies
in. Reference words: what stands between white space.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, groupby
from typing import Any

from megasparse.data.corpora.cutting import add_split_argument, cut, split_at, split_sizes, text_pieces
from megasparse.data.corpora.source import Document, Source, add_source_arguments, add_tokenizer_argument
from megasparse.data.text_encoder import TextEncoder
from megasparse.errors import DataError

HELP = "any text files, split by byte position"
EXAMPLE = "--source books/ --split 98,1,1 --output data/books"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    add_tokenizer_argument(parser)
    add_split_argument(parser)
    parser.add_argument("--documents", action="store_true", help="each file is a document, with a separator after it")


def encoder(settings: Mapping[str, Any]) -> TextEncoder:
    return TextEncoder(settings.get("tokenizer", "bytes"), documents=settings.get("documents", False))


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]:
    """The splits that are not 0 percent. Raises ConfigError for a bad --split, DataError for text that is not UTF-8
    where the tokenizer wants it, and for a split that gets nothing.
    """
    sizes = split_sizes(settings["split"], source.total_bytes)
    documents = settings.get("documents", False)
    as_bytes = settings.get("tokenizer", "bytes") == "bytes"
    if documents or not as_bytes:
        source.require_text(zeros=not (documents and as_bytes))
    starts = list(accumulate((part.size for part in source.parts), initial=0))[:-1]
    found = {split_at(start, sizes) for start in starts} if documents else {name for name in sizes if sizes[name]}
    for name in sizes:
        if name not in found:
            what = f"{len(starts)} documents" if documents else f"{source.total_bytes} bytes"
            other = _split_of_documents(starts, source.total_bytes) if documents else "another --split"
            raise DataError(source.name, f"{what} are too few to give {name} any", f"Give more text, or {other}")
    if not documents:
        return ((name, [text_pieces(stream)]) for name, stream in cut(source.pieces(), sizes, not as_bytes))
    grouped = groupby(zip(starts, source.parts, strict=True), key=lambda each: split_at(each[0], sizes))
    return ((name, (text_pieces(part.pieces()) for _, part in group)) for name, group in grouped)


def _split_of_documents(starts: list[int], total: int) -> str:
    """The option whose splits all get a document, with the most for training; without validation where none does."""
    for share in (5, 10, 15, 20, 25, 30):
        split = f"{100 - 2 * share},{share},{share}"
        sizes = split_sizes(split, total)
        if {split_at(start, sizes) for start in starts} == set(sizes):
            return f"--split {split}"
    return "--split 100,0,0"
