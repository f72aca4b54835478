"""JSON lines: of each line's object one field is the text of a document, with the tokenizer's separator after it.

Plain, or compressed as .gz, .bz2, .xz or .zst, or in zip archives; of a folder, the files named *.jsonl, *.ndjson or
*.json. Lines that are no record are left out and counted, up to one of a hundred.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megasparse.data.corpora.cutting import add_split_argument, lines
from megasparse.data.corpora.records import EMPTY, RecordSource, Unfit, about, add_record_arguments, encoder, splits
from megasparse.data.corpora.source import DECOMPRESS, Part, add_source_arguments, find_parts, read

HELP = "JSON lines: a field of each is a document"
EXAMPLE = "--source crawl/ --field text --min-bytes 200 --deduplicate --split 98,1,1 --output data/crawl"
SUFFIXES = [f".{name}{packed}" for name in ("jsonl", "ndjson", "json") for packed in ("", *DECOMPRESS)]
LONGEST_LINE = 1 << 26  # bytes
NOT_JSON = Unfit("not JSON", damaged=True)
NO_OBJECT = Unfit("no JSON object", damaged=True)
TOO_LONG = Unfit(f"a line of more than {LONGEST_LINE:,} bytes", damaged=True)
SURROGATE = Unfit("half a surrogate pair", damaged=True)
BOM = b"\xef\xbb\xbf"
__all__ = ["EXAMPLE", "HELP", "about", "add_arguments", "encoder", "open_source", "splits"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument("--field", dest="column", default="text", metavar="NAME", help="(default: %(default)s)")
    add_record_arguments(parser)
    add_split_argument(parser)


def open_source(
    locations: Sequence[str], member: str | None, downloads: Path, settings: Mapping[str, Any], workers: int
) -> RecordSource:
    """Find every file and read it once. Raises DataError for what is unreadable, or no JSON lines with the field."""
    parts = find_parts(locations, member, downloads, "files", SUFFIXES)
    return RecordSource.examine(locations, parts, texts, settings, workers, member=member)


def texts(part: Part, field: str) -> Iterator[tuple[int, bytes | Unfit]]:
    """(line from 1 on, its text or why it has none) of every line that is not blank."""
    no_field, no_text = Unfit(f'no "{field}"', damaged=True), Unfit(f'"{field}" is no text', damaged=True)
    for number, line in enumerate(lines(read(part), LONGEST_LINE), 1):
        if line is None:
            yield number, TOO_LONG
            continue
        if number == 1:
            line = line.removeprefix(BOM)
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError):
            yield number, NOT_JSON
            continue
        if not isinstance(record, dict):
            yield number, NO_OBJECT
        elif field not in record:
            yield number, no_field
        elif (text := record[field]) is None:
            yield number, EMPTY
        elif not isinstance(text, str):
            yield number, no_text
        else:
            try:
                yield number, text.encode()
            except UnicodeEncodeError:
                yield number, SURROGATE
