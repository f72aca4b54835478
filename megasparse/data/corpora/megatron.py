"""Megatron's data, PREFIX.bin and PREFIX.idx, read where they are: the output has links to them and an index.

PREFIX.bin is an array of tokens; PREFIX.idx says their type and where sequences and documents end:

    "MMIDIDX\\0\\0"; version 1: uint64; dtype: uint8; sequences S: uint64; borders of documents D: uint64
    tokens of each sequence: S int32; first byte of each: S int64; first sequence of each document, and S: D int64

Splits are cut at documents: one belongs to the split that its first byte lies in. Tokens of documents that were not
ended by --append-eod follow each other without a border.
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megasparse.data.corpora.cutting import add_split_argument, split_sizes
from megasparse.data.corpora.in_place import HINT, Format, examine, link, linking, reading, write_index
from megasparse.data.corpora.source import add_tokenizer_argument
from megasparse.data.index_file import MOST_SAMPLES, Shard, Width
from megasparse.data.members import Places
from megasparse.data.text_encoder import TextEncoder
from megasparse.errors import ConfigError, DataError

HELP = "Megatron's .bin and .idx files, read where they are: checks them and writes an index"
EXAMPLE = "--source corpus_text_document --tokenizer tokenizer.json --split 98,1,1 --output data/corpus"
MAGIC = b"MMIDIDX\0\0"
HEADER = 34  # bytes
WIDTHS: dict[int, Width] = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""Bytes a token by the code of a dtype; 6 and 7 are floating point."""
SAMPLE_BYTES = 65_536


class Borders(NamedTuple):
    """What an .idx file says."""

    width: Width
    documents: np.ndarray
    """First byte of each document, and the end of the last: int64 (documents + 1,)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", nargs="+", required=True, metavar="PREFIX", help="of PREFIX.bin and PREFIX.idx")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the index")
    add_tokenizer_argument(parser)
    add_split_argument(parser)


def write(given: argparse.Namespace, command: str) -> Path:
    """Check every token and write the index; its folder.

    Raises ConfigError for another tokenizer's width, DataError naming the file, and its byte, that is not Megatron's.
    """
    output: Path = given.output
    encoder = TextEncoder(given.tokenizer, documents=False)
    files = [Path(f"{prefix.removesuffix('.bin').removesuffix('.idx')}.bin") for prefix in given.source]
    found = {file: read_borders(file.with_suffix(".idx"), file) for file in dict.fromkeys(files)}
    parts = list(_parts(found, given.split))
    largest = max(stop - start for _, _, start, stop in parts)
    sample_bytes = SAMPLE_BYTES
    while -(-largest // sample_bytes) > MOST_SAMPLES:
        sample_bytes *= 2
    shards: dict[str, list[Shard]] = {}
    with linking(output) as links:
        for split, file, start, stop in parts:
            shards.setdefault(split, [])
            name = f"{split}-{len(shards[split]):06d}.bin"
            link(output, name, file, links)
            form = Format(found[file].width, len(encoder.tokenizer.word_starts()), 1)
            with reading(file) as descriptor:
                offsets = np.arange(start, stop, sample_bytes, dtype=np.int64)
                places = Places(offsets, np.minimum(sample_bytes, stop - offsets))
                shards[split].append(examine(descriptor, file, name, places, form, start, stop - start).shard)
        documents = sum(len(borders.documents) - 1 for borders in found.values())
        source = {"location": given.source, "bytes": sum(map(_size, found.values())), "documents": documents}
        settings = {"sample_bytes": sample_bytes, "split": given.split}
        write_index(output, encoder, shards, corpus="megatron", command=command, source=source, settings=settings)
    return output


def read_borders(index: Path, data: Path) -> Borders:
    """The borders of documents in the .bin file `data`. Raises DataError unless its .idx file is whole and fits it."""
    with reading(data) as descriptor:
        total = os.fstat(descriptor).st_size
    with reading(index) as descriptor:
        size = os.fstat(descriptor).st_size
        header = os.pread(descriptor, HEADER, 0)
        if len(header) < HEADER or not header.startswith(MAGIC) or header[9:17] != (1).to_bytes(8, "little"):
            raise DataError(index, "it is no index of Megatron's, version 1", "Give the prefix of its two files")
        code, sequences, borders = header[17], *(int.from_bytes(header[i : i + 8], "little") for i in (18, 26))
        if code not in WIDTHS:
            raise DataError(index, f"its dtype {code} is not one of tokens", "Give data of whole numbers")
        if borders < 2 or size != HEADER + 12 * sequences + 8 * borders:
            problem = f"{size:,} bytes do not hold {sequences:,} sequences and {borders:,} borders of documents"
            raise DataError(index, problem, f"{HINT}; data of several modes are not read")
    width = WIDTHS[code]
    try:
        lengths = np.memmap(index, "<i4", "r", HEADER, (sequences,))
        starts = np.memmap(index, "<i8", "r", HEADER + 4 * sequences, (sequences,))
        documents = np.memmap(index, "<i8", "r", HEADER + 12 * sequences, (borders,))
    except (OSError, ValueError, OverflowError):
        raise DataError(index, "it has no sequences", HINT) from None
    ends = np.cumsum(lengths, dtype=np.int64) * width
    if lengths.min() < 0 or starts[0] or (starts[1:] != ends[:-1]).any() or ends[-1] != total:
        raise DataError(index, f"its sequences are not the {total:,} bytes of {data.name}, one after another", HINT)
    if documents[0] or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise DataError(index, "its documents do not follow each other to the last sequence", HINT)
    return Borders(width, np.append(0, ends)[documents])


def _size(borders: Borders) -> int:
    return int(borders.documents[-1])


def _parts(found: Mapping[Path, Borders], split: str) -> Iterator[tuple[str, Path, int, int]]:
    """(split, file, first byte, end) of what each split has of each file, which is something.

    Raises ConfigError for a bad --split, or one that gives a split no tokens.
    """
    sizes = split_sizes(split, sum(map(_size, found.values())))
    stops = np.cumsum(list(sizes.values()))
    before, given = 0, set()
    for file, borders in found.items():
        places = np.searchsorted(stops, before + borders.documents[:-1], side="right")
        for number, name in enumerate(sizes):
            mine = np.flatnonzero(places == number)
            if len(mine) and (start := int(borders.documents[mine[0]])) < (
                stop := int(borders.documents[mine[-1] + 1])
            ):
                given.add(name)
                yield name, file, start, stop
        before += _size(borders)
    for name in sizes:
        if name not in given:
            raise ConfigError("--split", f"{split} gives {name} no document", "Give another, such as 100,0,0")
