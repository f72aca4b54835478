"""Shards that exist already, made elsewhere or without their index.json: the index is written beside them.

They are tar files train-NAME.tar, validation-NAME.tar and test-NAME.tar, whose members are samples: regular files named
by digits and .bin, of unsigned numbers, little endian, of `width` bytes each. Nothing is copied.
"""

import argparse
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megasparse.data.corpora.cutting import NAMES
from megasparse.data.corpora.in_place import HINT, Format, Found, examine, reading, write_index
from megasparse.data.corpora.number_files import natural
from megasparse.data.corpora.source import add_tokenizer_argument, positive
from megasparse.data.index_file import INDEX_FILE
from megasparse.data.members import BadMember, walk
from megasparse.data.text_encoder import TextEncoder, width_for
from megasparse.errors import ConfigError, DataError

HELP = "tar shards that exist already: checks them and writes their index"
EXAMPLE = "--source data/shards --tokenizer tokenizers/books.model --width 2"
SHARD_NAME = re.compile(r"\A(train|validation|test)-[A-Za-z0-9_-]+\.tar\Z")


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
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # hashing leaves the interpreter to others
        examined = pool.map(lambda name: _examine(directory / name, form), names)
        found = list(tqdm(examined, "checking shards", len(names), unit="shard", disable=None))
    of_split = {name: [each.shard for each in found if each.shard.file.startswith(f"{name}-")] for name in NAMES}
    splits = {name: shards for name, shards in of_split.items() if shards}
    sizes = {each.sample_bytes for each in found}
    settings: dict[str, Any] = {"sample_bytes": size} if len(sizes) == 1 and (size := sizes.pop()) else {}
    settings |= {"record": given.record} if given.record else {}
    source = {"location": [os.fspath(directory)], "bytes": sum(each.shard.bytes for each in found)}
    write_index(directory, encoder, splits, corpus="shards", command=command, source=source, settings=settings)
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


def _examine(path: Path, form: Format) -> Found:
    """The index's entry of a shard. Raises DataError naming the member, and its byte, that is no sample."""
    with reading(path) as descriptor:
        try:
            places, _ = walk(descriptor, os.fstat(descriptor).st_size, form.width)
        except BadMember as error:
            raise DataError(path, str(error), HINT) from None
        return examine(descriptor, path, path.name, places, form)
