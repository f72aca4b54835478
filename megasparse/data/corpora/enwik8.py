"""The corpus enwik8: the first 100,000,000 bytes of an English Wikipedia dump (Mahoney), split 90M/5M/5M by byte
position.

Reference words: what stands between white space, markup included.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megasparse.data.corpora.cutting import cut, text_pieces
from megasparse.data.corpora.source import Document, Source, add_source_arguments, add_tokenizer_argument
from megasparse.data.text_encoder import TextEncoder
from megasparse.errors import DataError

HELP = "enwik8 (100,000,000 bytes of Wikipedia), split 90M/5M/5M by byte position"
EXAMPLE = "--source https://mattmahoney.net/dc/enwik8.zip --output data/enwik8"
MD5 = "a1fa5ffddb56f4953e226637dabbb36a"  # as published with the file
SPLITS = {"train": 90_000_000, "validation": 5_000_000, "test": 5_000_000}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: figures on enwik8 are comparable only where everyone splits it alike."""
    add_source_arguments(parser)
    add_tokenizer_argument(parser)


def encoder(settings: Mapping[str, Any]) -> TextEncoder:
    return TextEncoder(settings.get("tokenizer", "bytes"))


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]:
    """The three splits. Raises DataError unless the source is the official file.

    With other tokenizers than bytes a border inside a character moves to its end.
    """
    official = sum(SPLITS.values())
    if source.total_bytes != official:
        problem = f"enwik8 has {official:,} bytes, this has {source.total_bytes:,}"
        hint = "Give the official enwik8 or enwik8.zip; a part of it can be prepared as the corpus `text`"
        raise DataError(source.name, problem, hint)
    if source.md5 != MD5:
        raise DataError(source.name, f"md5 is {source.md5}, enwik8's is {MD5}", "Download it again")
    whole_characters = settings.get("tokenizer", "bytes") != "bytes"
    return ((name, [text_pieces(stream)]) for name, stream in cut(source.pieces(), SPLITS, whole_characters))
