"""MosaicML's shards of tokens (MDS), read where they are: the output has links to them and an index.

The source is a folder with MosaicML's own index.json, or one with such folders named train, val (or validation, valid,
dev) and test. Tokens are the column `tokens` or `input_ids`, or the only one of whole numbers; of a column `bytes`,
whose type nobody states, they have --width bytes each. What is compressed is to be decompressed first.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megasparse.data.corpora.cutting import NAMES
from megasparse.data.corpora.huggingface import SPLIT_NAMES
from megasparse.data.corpora.in_place import HINT, Format, examine, link, linking, reading, write_index
from megasparse.data.corpora.source import add_tokenizer_argument
from megasparse.data.index_file import INDEX_FILE, Shard, Width
from megasparse.data.mds_file import BYTES_WIDTH, BadMds, mds_places, mds_width
from megasparse.data.members import Places
from megasparse.data.text_encoder import TextEncoder
from megasparse.errors import DataError

HELP = "MosaicML's shards of tokens (MDS), read where they are: checks them and writes an index"
EXAMPLE = "--source my-copy-c4/ --tokenizer tokenizer.json --output data/c4"
LARGEST_INDEX = 1 << 28  # bytes: some 500 for each shard


class RawFile(BaseModel):
    model_config = ConfigDict(strict=True)

    basename: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
    bytes: Annotated[int, Field(ge=1)]


class Entry(BaseModel):
    """A shard in MosaicML's index."""

    model_config = ConfigDict(strict=True)

    format: str
    raw_data: RawFile
    samples: Annotated[int, Field(ge=1)]


class MosaicIndex(BaseModel):
    model_config = ConfigDict(strict=True)

    version: Annotated[int, Field(ge=2, le=2)]
    shards: list[Entry]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, required=True, metavar="DIR", help="the folder of the shards")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the index")
    add_tokenizer_argument(parser)
    parser.add_argument("--width", type=int, choices=(1, 2, 4, 8), default=BYTES_WIDTH, help="of `bytes` (default: 8)")


def write(given: argparse.Namespace, command: str) -> Path:
    """Check every token of every shard and write the index; its folder. Raises DataError naming the file and sample
    that is not as it should be.
    """
    output: Path = given.output
    encoder = TextEncoder(given.tokenizer)
    folders = _folders(given.source)
    entries = {
        name: [(folder / entry.raw_data.basename, entry) for entry in read_index(folder).shards]
        for name, folder in folders.items()
    }
    with linking(output) as links:
        splits: dict[str, list[Shard]] = {}
        for name, files in entries.items():
            for number, (file, entry) in enumerate(files):
                link(output, linked := f"{name}-{number:06d}.mds", _there(file), links)
                splits.setdefault(name, []).append(_examine(file, linked, entry, encoder, given.width))
        if not splits:
            raise DataError(given.source, "there is no shard in it", "Check --source")
        total = sum(shard.bytes for shards in splits.values() for shard in shards)
        source = {"location": [os.fspath(given.source)], "bytes": total}
        write_index(output, encoder, splits, corpus="mds", command=command, source=source, settings={})
    return output


def read_index(folder: Path) -> MosaicIndex:
    """MosaicML's index of a folder. Raises DataError where it is none."""
    path = folder / INDEX_FILE
    with reading(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > LARGEST_INDEX:
            raise DataError(path, f"{size:,} bytes are too many for an index (at most {LARGEST_INDEX:,})", HINT)
        raw = os.pread(descriptor, size, 0)
    try:
        return MosaicIndex.model_validate(json.loads(raw.decode()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ascii(".".join(map(str, first["loc"])))[1:100]
        raise DataError(path, f"it is no index of MosaicML's: {where}: {first['msg'][:100]}", HINT) from None
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"it is not JSON ({type(error).__name__})", HINT) from None


def _folders(source: Path) -> dict[str, Path]:
    """The folder of each split."""
    if (source / INDEX_FILE).exists():
        return {"train": source}
    found: dict[str, Path] = {}
    for name, split in SPLIT_NAMES.items():
        if (source / name / INDEX_FILE).exists():
            if split in found:
                raise DataError(source, f"{name} and {found[split].name} are both {split}", "Leave one out")
            found[split] = source / name
    if not found:
        problem = f"there is no {INDEX_FILE}, nor folders {', '.join(SPLIT_NAMES)} with one"
        raise DataError(source, problem, "Give the folder that MosaicML's writer made")
    return {name: found[name] for name in NAMES if name in found}


def _there(file: Path) -> Path:
    packed = next((path for path in file.parent.glob(f"{file.name}.*")), None) if not file.exists() else None
    if packed is not None:
        raise DataError(packed, "it is compressed, and cannot be read where it is", "Decompress all shards first")
    return file


def _examine(file: Path, name: str, entry: Entry, encoder: TextEncoder, bytes_width: Width) -> Shard:
    with reading(file) as descriptor:
        total = os.fstat(descriptor).st_size
        if entry.format != "mds" or total != entry.raw_data.bytes:
            problem = f"it has {total:,} bytes, its index says {entry.raw_data.bytes:,} of {ascii(entry.format)[:20]}"
            raise DataError(file, problem, HINT)
        try:
            width = mds_width(descriptor, total) or bytes_width
            places = Places(*mds_places(descriptor, total, width))
        except BadMds as error:
            raise DataError(file, str(error), HINT) from None
        if len(places.sizes) != entry.samples:
            raise DataError(file, f"it has {len(places.sizes):,} samples, its index says {entry.samples:,}", HINT)
        return examine(descriptor, file, name, places, Format(width, len(encoder.tokenizer.word_starts()), 1)).shard
