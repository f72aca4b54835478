"""Parquet files: of each row one column is the text of a document, with the tokenizer's separator after it.

Of a folder, the files named *.parquet are read, a few hundred rows at a time. Rows whose text is no UTF-8 are left out
and counted, up to one of a hundred. It needs `pip install 'megasparse[arrow]'`.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megasparse.data.corpora.arrow import parquet_values
from megasparse.data.corpora.cutting import add_split_argument
from megasparse.data.corpora.records import (
    RecordSource,
    Unfit,
    about,
    add_column_argument,
    add_record_arguments,
    encoder,
    from_values,
    splits,
)
from megasparse.data.corpora.source import Part, add_sample_argument, add_source_argument, find_parts

HELP = "Parquet files: a column of texts, each a document"
EXAMPLE = "--source crawl/ --column text --min-bytes 200 --split 98,1,1 --output data/crawl"
__all__ = ["EXAMPLE", "HELP", "about", "add_arguments", "encoder", "open_source", "splits"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_argument(parser)
    add_sample_argument(parser)
    add_column_argument(parser)
    add_record_arguments(parser)
    add_split_argument(parser)


def open_source(
    locations: Sequence[str], member: str | None, downloads: Path, settings: Mapping[str, Any], workers: int
) -> RecordSource:
    """Find every file and read its column once. Raises DataError for an unreadable one, ConfigError for the column."""
    parts = find_parts(locations, member, downloads, "raw", [".parquet"])
    return RecordSource.examine(locations, parts, texts, settings, workers)


def texts(part: Part, column: str) -> Iterator[tuple[int, bytes | Unfit]]:
    """(row from 1 on, its text or why it has none)."""
    return from_values(parquet_values(part.path, column))
