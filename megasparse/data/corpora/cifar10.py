"""CIFAR-10 (Krizhevsky 2009): images of 32×32 pixels, 3,072 tokens each. The labels are left out.

The official binary version, cifar-10-binary.tar.gz or the files in it, is in no order of classes: the last 5,000 of the
training set, data_batch_5.bin's second half, are the split `validation`. In folders and tar archives of images, whose
order is often that of the classes, every 10th of the training set is.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from megasparse.data.corpora import images
from megasparse.data.corpora.image_files import ARCHIVE, members, part_content
from megasparse.data.corpora.official import verify_official
from megasparse.data.corpora.pixels import PixelEncoder, planar_piece
from megasparse.data.corpora.source import Document, Source, add_source_arguments
from megasparse.errors import DataError

HELP = "CIFAR-10: the official binary version, or folders and tar archives of its images"
EXAMPLE = "--source https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz --output data/cifar10"
RAW = True
SIDE = 32
IMAGE = 3 * SIDE * SIDE
RECORD = 1 + IMAGE  # the label, then the planes
RECORDS = 10_000  # of a batch
VALIDATION = 5_000
PIECE = 250  # images
VALIDATION_EVERY = 10  # where it is images in files
BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
PICKLED = re.compile(r"\A(data_batch_[1-5]|test_batch)\Z")
MD5 = {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}
"""Published checksums."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """CIFAR-10 has no options of its own: everyone splits it alike."""
    add_source_arguments(parser)


def encoder(settings: Mapping[str, Any]) -> PixelEncoder:
    return PixelEncoder(SIDE)


def about(source: Source, settings: Mapping[str, Any]) -> dict[str, Any]:
    """{"verified"}: the files that have the published md5. Raises DataError for one that only has the name."""
    return {"verified": verify_official(source, MD5)}


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]:
    """Train 45,000, validation 5,000 and test 10,000 images.

    Raises DataError for a pickled batch, for one that is missing or has another size, and for images whose folders do
    not say train or test.
    """
    there = {name for name, _ in _batches(source)}
    if not there:
        return images.labelled(source, images.hold_out(images.splits_by_folder(source), VALIDATION_EVERY))
    for name in BATCHES:
        if name not in there:
            raise DataError(source.name, f"{name} is not here", "Give all six batches of the binary version")
    *whole, last, test = BATCHES
    border = RECORDS - VALIDATION
    streams = {
        "train": _images(source, [*((name, 0, RECORDS) for name in whole), (last, 0, border)]),
        "validation": _images(source, [(last, border, RECORDS)]),
        "test": _images(source, [(test, 0, RECORDS)]),
    }
    return ((name, [stream]) for name, stream in streams.items())


def _images(source: Source, wanted: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
    """The images start..stop of batches."""
    for name, start, stop in wanted:
        content = next(content() for found, content in _batches(source) if found == name)
        planes = np.frombuffer(content, dtype=np.uint8).reshape(RECORDS, RECORD)[start:stop, 1:]
        for first in range(0, len(planes), PIECE):
            yield planar_piece(planes[first : first + PIECE].tobytes())


def _batches(source: Source) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Name and content of each batch, in files and in tar archives; the latter only until the next is asked for."""
    for part in source.parts:
        if not ARCHIVE.search(part.name):
            if _is_batch(part.name, str(part), part.size):
                yield PurePosixPath(part.name).name, partial(part_content, part)
            continue
        for member, read in members(part.path):
            if member.isreg() and _is_batch(member.name, f"{part}:{member.name}", member.size):
                yield PurePosixPath(member.name).name, read


def _is_batch(name: str, shown: str, size: int) -> bool:
    """Raises DataError for a pickled batch, and for one of another size."""
    name = PurePosixPath(name).name
    if PICKLED.match(name):
        problem = "this batch is a pickle, which could run anything when it is read"
        raise DataError(ascii(shown)[1:-1], problem, "Give the binary version, cifar-10-binary.tar.gz")
    if name in BATCHES and size != RECORDS * RECORD:
        problem = f"this batch has {size:,} bytes, {RECORDS * RECORD:,} are expected"
        raise DataError(ascii(shown)[1:-1], problem, "Get it again: it is damaged, or of another data set")
    return name in BATCHES
