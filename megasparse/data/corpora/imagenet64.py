"""ImageNet at 64×64 pixels, 12,288 tokens an image. Two versions exist, and bits/dim on one say nothing of the other:

    box       Chrabaszcz, Loshchilov and Hutter 2017: Imagenet64_*_npz.zip, or the npz batches in them
    pixelrnn  van den Oord, Kalchbrenner and Kavukcuoglu 2016: train_64x64.tar, valid_64x64.tar (older papers)

As in the papers, figures are reported on the official validation set: it is the split `test`. Of the training set,
which is in no known order, every 128th image is the split `validation`.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from megasparse.data.corpora import images
from megasparse.data.corpora.image_files import folders
from megasparse.data.corpora.number_files import batches, natural, rows
from megasparse.data.corpora.official import verify_official
from megasparse.data.corpora.pixels import PixelEncoder, planar_piece
from megasparse.data.corpora.source import Document, Part, Source
from megasparse.errors import ConfigError, DataError

HELP = "ImageNet at 64×64 pixels: npz batches, or folders and tar archives of images"
EXAMPLE = "--source Imagenet64_*_npz.zip --output data/imagenet64"
RAW = True
SIDE = 64
VALIDATION_EVERY = 128
PIXELRNN = re.compile(r"\A(train|valid)_64x64\Z")
PICKLED = re.compile(r"\A(train_data_batch_[0-9]+|val_data)\Z")
SHA256 = {
    "Imagenet64_train_part1_npz.zip": "9422dc1dc5d092e9814a70a1cb7fc74880d2db5d88a0cb8a34ee363b12bde3f1",
    "Imagenet64_train_part2_npz.zip": "9fafc115afb7e6c301e66dc16b2d737152b427bd5dab26e1293487a6819c7f30",
    "Imagenet64_val_npz.zip": "e1e75133158a1924135a9c6f97a80d2d237b158945e0b34074e58e6c8430eeb8",
    "train_64x64.tar": "e2a2c1947a748d0d256e98e6d82800d855441dc9e4de2e71a773f1324c4524d7",
    "valid_64x64.tar": "eeac03ec4f585baf871d2b4cb9c974bfe345e74878a74e5820fe6eb1041629cd",
}
"""Checksums of the official archives, as TensorFlow Datasets publishes them."""


class Batch(NamedTuple):
    part: Part
    name: str
    train: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    images.add_image_arguments(parser)
    parser.add_argument(
        "--downsampling",
        choices=("box", "pixelrnn"),
        help="how the images were made small, where the files are not the official ones",
    )


def encoder(settings: Mapping[str, Any]) -> PixelEncoder:
    return PixelEncoder(SIDE)


def about(source: Source, settings: Mapping[str, Any]) -> dict[str, Any]:
    """{"downsampling", "verified"}: which of the two versions, and which archives have the published sha256.

    Raises DataError for an official archive that has not, ConfigError where the version is missing or wrong.
    """
    verified = verify_official(source, SHA256)
    found = "box" if _batches(source) else "pixelrnn" if _is_pixelrnn(source) else None
    given = settings["downsampling"]
    if found and given not in (None, found):
        problem = f'"{given}" is not how these official files were made'
        raise ConfigError("--downsampling", problem, f"Leave it out: they are {found}")
    if not found and not given:
        problem = "the source does not say how its images were made small, and figures cannot be compared across that"
        raise ConfigError("--downsampling", problem, "Give box (box filter, as the npz batches) or pixelrnn")
    return {"downsampling": found or given, "verified": verified}


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]:
    """Train, every 128th of it as validation, and the official validation set as test.

    Images whose folders name no split are shared out by --split, as those of the corpus `images` are.
    """
    found = _batches(source)
    if not found:
        return images.labelled(source, images.shared_out(source, settings) or _by_folder(source))
    if settings["split"] is not None:
        raise ConfigError("--split", "the official batches are split already", "Leave it out")
    train, test = ([batch for batch in found if batch.train is which] for which in (True, False))
    streams = {
        "train": _rows(train, lambda image: (image + 1) % VALIDATION_EVERY != 0),
        "validation": _rows(train, lambda image: (image + 1) % VALIDATION_EVERY == 0),
        "test": _rows(test, lambda image: image >= 0),
    }
    return ((name, [stream]) for name, stream in streams.items())


def _is_pixelrnn(source: Source) -> bool:
    return all(any(PIXELRNN.search(name) for name in folders(source, part)) for part in source.parts)


def _by_folder(source: Source) -> list[str]:
    """The split of each image by its folders; where there is no test set, the validation set is the official one."""
    labels = images.splits_by_folder(source)
    if "test" in labels:
        return labels
    return images.hold_out(["test" if name == "validation" else name for name in labels], VALIDATION_EVERY)


def _batches(source: Source) -> list[Batch]:
    """The batches of numbers of a source, those of the training set in the order of their numbers.

    Raises DataError for pickled ones, and for other files beside batches.
    """
    found: list[Batch] = []
    others: list[Part] = []
    for part in source.parts:
        name = PurePosixPath(part.name).name
        if PICKLED.match(name):
            problem = "this batch is a pickle, which could run anything when it is read"
            raise DataError(str(part), problem, "Give the npz version: Imagenet64_*_npz.zip, or what is in it")
        if name.endswith((".npz", ".zip")):
            stems = [(batch, PurePosixPath(batch).name) for batch in batches(part.path)]
            found += [Batch(part, batch, stem.startswith("train")) for batch, stem in stems]
        else:
            others.append(part)
    if found and others:
        raise DataError(str(others[0]), "this is no npz batch, as others of the source are", "Leave it out of --source")
    return sorted(found, key=lambda batch: natural(PurePosixPath(batch.name).name))


def _rows(found: Sequence[Batch], wanted: Callable[[np.ndarray], np.ndarray]) -> Iterator[bytes]:
    """The images of batches whose number, counted through all of them, is wanted."""
    first = 0
    for batch in found:
        for piece in rows(batch.part.path, batch.name, 3 * SIDE * SIDE):
            planes = np.frombuffer(piece, dtype=np.uint8).reshape(-1, 3 * SIDE * SIDE)
            keep = wanted(np.arange(first, first + len(planes)))
            first += len(planes)
            if keep.any():
                yield planar_piece(planes[keep].tobytes())
