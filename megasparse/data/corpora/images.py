"""Images of one's own, all of one size, in folders and tar archives.

The split of each is named by a folder that it lies in (train, validation or valid, test, also with numbers behind it:
valid_64x64), or by an archive named so (train-01.tar); otherwise a permutation drawn from --seed shares them out.
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from megasparse.data.corpora.cutting import NAMES, split_sizes
from megasparse.data.corpora.image_files import image_files
from megasparse.data.corpora.pixels import SUFFIXES, PixelEncoder, file_piece
from megasparse.data.corpora.source import Document, Source, add_source_arguments, positive
from megasparse.errors import ConfigError, DataError

HELP = "image files of one size, in folders or tar archives"
EXAMPLE = "--source photos/ --size 64 --output data/photos"
RAW = True
SPLIT_NAME = re.compile(r"\A(train|valid|val|test)(ing|ation)?([_.-]?[0-9][0-9x_.-]*)?\Z", re.IGNORECASE)
DEFAULT_SPLIT = "90,5,5"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_image_arguments(parser)
    parser.add_argument(
        "--size", type=positive, default=64, metavar="S", help="every image has S×S pixels (default: %(default)s)"
    )


def add_image_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a source of images whose size is known."""
    add_source_arguments(parser)
    parser.add_argument(
        "--split",
        metavar="TRAIN,VALIDATION,TEST",
        help=f"percent of the images for each split, at random (default: as folders name it, else {DEFAULT_SPLIT})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of that permutation (default: %(default)s)")


def encoder(settings: Mapping[str, Any]) -> PixelEncoder:
    return PixelEncoder(settings["size"])


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]:
    """The splits that have images; a piece is an image's file.

    Raises ConfigError for a bad --split, DataError when there is no image, or the splits of some are not named.
    """
    return labelled(source, shared_out(source, settings) or splits_by_folder(source))


def splits_by_folder(source: Source) -> list[str]:
    """The split of each image of a source, by its folders. Raises DataError for one whose folders name none."""
    labels = []
    for image in image_files(source):
        name = split_named(image.folders)
        if name is None:
            problem = "no folder names the split of this image"
            raise DataError(ascii(image.name)[1:-1], problem, "Move it below train, validation or test")
        labels.append(name)
    if not labels:
        kinds = ", ".join(SUFFIXES)
        raise DataError(source.name, "there is no image here", f"Give folders or tar archives of files named {kinds}")
    return labels


def split_named(folders: Sequence[str]) -> str | None:
    """The split that the first of the folders named like one stands for."""
    for folder in folders:
        if match := SPLIT_NAME.match(folder):
            return "validation" if match[1].lower().startswith("val") else match[1].lower()
    return None


def shared_out(source: Source, settings: Mapping[str, Any]) -> list[str]:
    """The split of each image by --split, or, where no folder names one, by the default percentages; else [].

    The permutation is made of raw Philox words: numpy promises those to stay the same in every version.
    """
    split, seed = settings["split"], settings["seed"]
    if seed < 0:
        raise ConfigError("--seed", f"{seed} is negative", "Give 0 or more")
    count = 0
    for image in image_files(source):
        if split is None and split_named(image.folders):
            return []
        count += 1
    order = np.argsort(np.random.Philox(np.random.SeedSequence(seed)).random_raw(count), kind="stable")
    labels = [""] * count
    start = 0
    for name, size in split_sizes(split or DEFAULT_SPLIT, count).items():
        if size == 0 < count:
            problem = f"{count} images are too few to give {name} any"
            raise DataError(source.name, problem, "Give more images, or another --split")
        for image in order[start : start + size]:
            labels[image] = name
        start += size
    return labels


def hold_out(labels: Sequence[str], every: int) -> list[str]:
    """The splits with every so-manyth image of train in validation, where no other is."""
    if "validation" in labels:
        return list(labels)
    number = np.cumsum([name == "train" for name in labels])
    return [
        "validation" if name == "train" and n % every == 0 else name for name, n in zip(labels, number, strict=True)
    ]


def labelled(source: Source, labels: Sequence[str]) -> Iterator[tuple[str, Iterable[Document]]]:
    """The splits of a source's images by the label of each."""
    there = set(labels)
    return ((name, [_chosen(source, labels, name)]) for name in NAMES if name in there)


def _chosen(source: Source, labels: Sequence[str], name: str) -> Iterator[bytes]:
    for wanted, image in zip_longest(labels, image_files(source)):
        if wanted is None or image is None:
            raise DataError(source.name, "it changed while it was read", "Leave it alone and run the command again")
        if wanted == name:
            yield file_piece(image.name, image.read())
