"""enwik8: the first 100,000,000 bytes of an English Wikipedia dump (Mahoney), split 90M/5M/5M by byte position."""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megasparse.data.corpora.source import Source, add_source_arguments, cut
from megasparse.errors import DataError

HELP = "enwik8 (100,000,000 bytes of Wikipedia), split 90M/5M/5M by byte position"
MD5 = "a1fa5ffddb56f4953e226637dabbb36a"  # as published with the file
SPLITS = {"train": 90_000_000, "validation": 5_000_000, "test": 5_000_000}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """enwik8 has no options of its own: figures on it are comparable because everyone splits it alike."""
    add_source_arguments(parser)


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[bytes]]]:
    """The three splits. Raises DataError unless the source is the official file."""
    official = sum(SPLITS.values())
    if source.total_bytes != official:
        problem = f"enwik8 has {official:,} bytes, this has {source.total_bytes:,}"
        mend = "Give the official enwik8 or enwik8.zip; a part of it can be prepared as the corpus `text`"
        raise DataError(source.name, problem, mend)
    if source.md5 != MD5:
        raise DataError(source.name, f"md5 is {source.md5}, enwik8's is {MD5}", "Download it again")
    return cut(source.pieces(), SPLITS)
