"""Shards that exist already, made elsewhere or without their index.json: the index is written beside them.

They are tar files train-NAME.tar, validation-NAME.tar and test-NAME.tar, whose members are samples: regular files named
by digits and .bin, of unsigned numbers, little endian, of `width` bytes each. Nothing is copied.
"""

import argparse
import os
import re
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from megasparse.data.corpora.cutting import NAMES
from megasparse.data.corpora.number_files import natural
from megasparse.data.corpora.source import add_tokenizer_argument, positive
from megasparse.data.files import file_sha256, replacing
from megasparse.data.index_file import INDEX_FILE, MOST_SAMPLES, IndexFile, Shard, Split, TokenizerEntry
from megasparse.data.members import BLOCK, PIECE, BadMember, open_shard, walk
from megasparse.data.text_encoder import TextEncoder, width_for
from megasparse.errors import ConfigError, DataError

HELP = "tar shards that exist already: checks them and writes their index"
EXAMPLE = "--source data/shards --tokenizer tokenizers/books.model --width 2"
SHARD_NAME = re.compile(r"\A(train|validation|test)-[A-Za-z0-9_-]+\.tar\Z")
HINT = "Repair or remove it, then run the command again"


class Format(NamedTuple):
    """Requirements that every sample meets."""

    width: Literal[1, 2, 4]
    ids: int
    """Every token is below this."""
    record: int
    """Every sample has a multiple of so many tokens."""


class Found(NamedTuple):
    shard: Shard
    sample_bytes: int | None
    """Bytes of every sample but the last, which may have less; None where they differ."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, required=True, metavar="DIR", help="the folder of the shards")
    add_tokenizer_argument(parser)
    parser.add_argument(
        "--width", type=int, choices=(1, 2, 4), help="bytes a token (default: what megasparse prepare-data writes)"
    )
    parser.add_argument("--record", type=positive, metavar="N", help="tokens of a record, such as an image")


def write(given: argparse.Namespace, command: str) -> Path:
    """Check every member of every shard in the folder and write its index.json; the folder.

    Raises ConfigError for options that do not fit each other, DataError naming shard, member and byte of what is no
    sample.
    """
    directory: Path = given.source
    encoder = TextEncoder(given.tokenizer)
    ids = len(encoder.tokenizer.word_starts())
    form = Format(given.width or encoder.width, ids, given.record or 1)
    if form.width < encoder.width:
        problem = f"{form.width} byte cannot hold the ids of {encoder.name}, up to {ids - 1}"
        raise ConfigError("--width", problem, f"Give {width_for(ids - 1)}, or the tokenizer that the shards have")
    if given.record is None and encoder.name == "pixels":
        raise ConfigError("--record", "the number of tokens of an image is not given", "Give it, 12288 for 64×64 RGB")
    names = _names(directory)
    splits: dict[str, Split] = {}
    with (
        tqdm(desc="checking shards", total=len(names), unit="shard", disable=None) as bar,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,  # hashing leaves the interpreter to others
    ):
        try:
            tasks = [pool.submit(_examine, directory / name, form) for name in names]
            for task in tasks:
                task.add_done_callback(lambda _: bar.update())
            found = [task.result() for task in tasks]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for split in NAMES:
        shards = tuple(each.shard for each in found if each.shard.file.startswith(f"{split}-"))
        if shards:
            splits[split] = _split(shards, encoder.name in ("bytes", "pixels"))
    sizes = {each.sample_bytes for each in found}
    settings: dict[str, Any] = {"sample_bytes": size} if len(sizes) == 1 and (size := sizes.pop()) else {}
    index = IndexFile(
        tokenizer=TokenizerEntry(name=encoder.name, sha256=encoder.sha256),
        corpus="shards",
        command=command,
        source={"location": [os.fspath(directory)], "bytes": sum(each.shard.bytes for each in found)},
        settings=settings | ({"record": given.record} if given.record else {}),
        splits=splits,
    )
    with replacing(directory / INDEX_FILE) as file:
        file.write(index.model_dump_json(indent=2).encode() + b"\n")
    return directory


def _names(directory: Path) -> list[str]:
    """The shards of a folder, by split and number. Raises DataError for what is none, or has an index."""
    if not directory.is_dir():
        raise DataError(directory, "there is no such folder", "Check --source")
    if (directory / INDEX_FILE).exists():
        problem = "these shards have an index already"
        raise DataError(directory / INDEX_FILE, problem, "Remove it if it is wrong, then run the command again")
    names = sorted((path.name for path in directory.glob("*.tar") if not path.name.startswith(".")), key=natural)
    for name in names:
        if not SHARD_NAME.match(name):
            problem = "its name does not name its split"
            raise DataError(ascii(os.fspath(directory / name))[1:-1], problem, "Call it train-NAME.tar, say")
    if not names:
        raise DataError(directory, "there is no shard here", "Give the folder that has files train-NAME.tar")
    return names


def _split(shards: Sequence[Shard], bytes_are_tokens: bool) -> Split:
    tokens, samples = sum(shard.tokens for shard in shards), sum(shard.samples for shard in shards)
    raw_bytes = tokens if bytes_are_tokens else None
    return Split(tokens=tokens, samples=samples, shards=tuple(shards), raw_bytes=raw_bytes)


def _examine(path: Path, form: Format) -> Found:
    """The index's entry of a shard. Raises DataError naming the member, and its byte, that is no sample."""
    try:
        descriptor = open_shard(path)
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", HINT) from None
    try:
        total = os.fstat(descriptor).st_size
        places, _ = walk(descriptor, total, form.width)
        sizes = places.sizes.tolist()
        if not 1 <= len(sizes) <= MOST_SAMPLES:
            raise DataError(path, f"it has {len(sizes):,} samples, 1 to {MOST_SAMPLES:,} are expected", HINT)
        crc32 = [
            _checksum(descriptor, path, member, offset, size, form)
            for member, (offset, size) in enumerate(zip(places.offsets.tolist(), sizes, strict=True))
        ]
        even = set(sizes[:-1]) <= {sizes[0]} and sizes[-1] <= sizes[0]
        shard = Shard(
            file=path.name,
            samples=len(sizes),
            tokens=sum(sizes) // form.width,
            width=form.width,
            bytes=total,
            sha256=file_sha256(descriptor),
            crc32="".join(crc32),
        )
        return Found(shard, sizes[0] if even else None)
    except BadMember as error:
        raise DataError(path, str(error), HINT) from None
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", HINT) from None
    finally:
        os.close(descriptor)


def _checksum(descriptor: int, path: Path, member: int, offset: int, size: int, form: Format) -> str:
    """Return the crc32 of a sample, 8 digits. Raises DataError when its tokens are not as they should be."""
    where = f"member {member} at byte {offset - BLOCK}"
    if size // form.width % form.record:
        problem = f"{where} has {size // form.width} tokens, no whole number of records of {form.record}"
        raise DataError(path, problem, HINT)
    crc32 = 0
    for start in range(0, size, PIECE):
        piece = os.pread(descriptor, min(PIECE, size - start), offset + start)
        crc32 = zlib.crc32(piece, crc32)
        largest = int(np.frombuffer(piece, dtype=f"<u{form.width}").max(initial=0))
        if largest >= form.ids:
            problem = f"{where} has the token {largest}, the tokenizer's are below {form.ids}"
            raise DataError(path, problem, "Give the tokenizer and the --width that the shards were made with")
    return f"{crc32:08x}"
