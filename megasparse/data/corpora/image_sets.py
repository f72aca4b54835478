"""CIFAR-10 and ImageNet at 64×64 pixels: the official archives, checked against published checksums, or image files."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar
from zipfile import ZipFile

import numpy as np
from numpy.lib import format as npy

from megasparse.data.corpora import images
from megasparse.data.corpora.corpus import Corpus, CorpusSettings, CorpusSplits, option
from megasparse.data.corpora.images import ARCHIVE, PixelEncoder, folders, members, part_content, planar_piece
from megasparse.data.corpora.source import PIECE, Part, Source, open_zip
from megasparse.errors import ConfigError, DataError
from megasparse.files import natural

SIDE = 32
IMAGE = 3 * SIDE * SIDE
RECORD = 1 + IMAGE  # the label, then the planes
RECORDS = 10_000  # of a batch
PICKLED = re.compile(r"\A(data_batch_[1-5]|test_batch)\Z")
BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")


class Cifar10(Corpus):
    """CIFAR-10 (Krizhevsky 2009): images of 32×32 pixels, 3,072 tokens each. The labels are left out.

    The last 5,000 training images of the official binary version (cifar-10-binary.tar.gz or its files), which are in
    random order, are the split `validation`. In folders and archives of images, often sorted by class, every 10th is.
    """

    EXAMPLE = "--source https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz --output data/cifar10"
    KIND = "raw"
    VALIDATION = 5_000
    PIECE = 250  # images
    VALIDATION_EVERY = 10  # of image files
    MD5: ClassVar = {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}  # published

    def encoder(self, settings: CorpusSettings) -> PixelEncoder:
        return PixelEncoder(SIDE)

    def about(self, source: Source, settings: CorpusSettings) -> dict[str, Any]:
        return {"verified": verify_official(source, self.MD5)}

    def splits(self, source: Source, settings: CorpusSettings) -> CorpusSplits:
        names = {name for name, _ in self._batches(source)}
        if not names:
            return images.labelled(source, images.hold_out(images.splits_by_folder(source), self.VALIDATION_EVERY))
        for name in BATCHES:
            if name not in names:
                raise DataError(source.name, f"{name} is not here", "Give all six batches of the binary version")
        *whole, last, test = BATCHES
        border = RECORDS - self.VALIDATION
        streams = {
            "train": self._images(source, [*((name, 0, RECORDS) for name in whole), (last, 0, border)]),
            "validation": self._images(source, [(last, border, RECORDS)]),
            "test": self._images(source, [(test, 0, RECORDS)]),
        }
        return ((name, [stream]) for name, stream in streams.items())

    def _images(self, source: Source, ranges: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
        for name, start, stop in ranges:
            content = next(content() for batch, content in self._batches(source) if batch == name)
            planes = np.frombuffer(content, dtype=np.uint8).reshape(RECORDS, RECORD)[start:stop, 1:]
            for first in range(0, len(planes), self.PIECE):
                yield planar_piece(planes[first : first + self.PIECE].tobytes())

    def _batches(self, source: Source) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """Yield name and content of each batch in files and tar archives; of the latter only until the next one."""
        for part in source.parts:
            if part.name.lower().endswith(".zip") or not ARCHIVE.search(part.name):
                if _is_batch(part.name, str(part), part.size):
                    yield PurePosixPath(part.name).name, partial(part_content, part)
                continue
            for member, read in members(part.path):
                if member.isreg() and _is_batch(member.name, f"{part}:{member.name}", member.size):
                    yield PurePosixPath(member.name).name, read


def _is_batch(name: str, shown: str, size: int) -> bool:
    """True for a batch. Raises DataError for a pickled batch, and for one of another size."""
    name = PurePosixPath(name).name
    if PICKLED.match(name):
        problem = "this batch is a pickle, which could run anything when it is read"
        raise DataError(shown, problem, "Give the binary version, cifar-10-binary.tar.gz")
    if name in BATCHES and size != RECORDS * RECORD:
        raise DataError(shown, f"this batch has {size:,} bytes, {RECORDS * RECORD:,} are expected", "Get it again")
    return name in BATCHES


IMAGENET_SIDE = 64
PIXELRNN = re.compile(r"\A(train|valid)_64x64\Z")
PICKLED_NPZ = re.compile(r"\A(train_data_batch_[0-9]+|val_data)\Z")
ARRAY = "data.npy"


NumberBatch = tuple[Path, str]
"""(file, name) of a batch in an npz file or in a zip archive of them."""


class ImageNet64(Corpus):
    """ImageNet at 64×64 pixels, 12,288 tokens an image. There are two versions, and their bits/dim cannot be compared:

        box       Chrabaszcz, Loshchilov and Hutter 2017: Imagenet64_*_npz.zip, or the npz batches in them
        pixelrnn  van den Oord, Kalchbrenner and Kavukcuoglu 2016: train_64x64.tar, valid_64x64.tar, or .zip (older
                  papers)

    As in the papers, figures are reported on the official validation set: it is the split `test`. Every 128th training
    image is the split `validation`.
    """

    EXAMPLE = "--source Imagenet64_*_npz.zip --output data/imagenet64"
    KIND = "raw"
    VALIDATION_EVERY = 128
    SHA256: ClassVar = {
        "Imagenet64_train_part1_npz.zip": "9422dc1dc5d092e9814a70a1cb7fc74880d2db5d88a0cb8a34ee363b12bde3f1",
        "Imagenet64_train_part2_npz.zip": "9fafc115afb7e6c301e66dc16b2d737152b427bd5dab26e1293487a6819c7f30",
        "Imagenet64_val_npz.zip": "e1e75133158a1924135a9c6f97a80d2d237b158945e0b34074e58e6c8430eeb8",
        "train_64x64.tar": "e2a2c1947a748d0d256e98e6d82800d855441dc9e4de2e71a773f1324c4524d7",
        "valid_64x64.tar": "eeac03ec4f585baf871d2b4cb9c974bfe345e74878a74e5820fe6eb1041629cd",
    }
    """Checksums of the official archives, as TensorFlow Datasets publishes them."""

    SMALL = "how the images were made small, if the files are not the official ones"
    OPTIONS = images.SHARED_OUT | option("--downsampling", choices=("box", "pixelrnn"), help=SMALL)

    def encoder(self, settings: CorpusSettings) -> PixelEncoder:
        return PixelEncoder(IMAGENET_SIDE)

    def about(self, source: Source, settings: CorpusSettings) -> dict[str, Any]:
        verified = verify_official(source, self.SHA256)
        official = "box" if self._batches(source) else None
        if not official and all(any(PIXELRNN.search(name) for name in folders(source, p)) for p in source.parts):
            official = "pixelrnn"
        requested = settings["downsampling"]
        if official and requested not in (None, official):
            raise ConfigError("--downsampling", f'"{requested}", but these official files are {official}', "Omit it")
        if not official and not requested:
            problem = "the source does not say how its images were made small, and figures of the two differ"
            raise ConfigError("--downsampling", problem, "Give box (box filter, as the npz batches) or pixelrnn")
        return {"downsampling": official or requested, "verified": verified}

    def splits(self, source: Source, settings: CorpusSettings) -> CorpusSplits:
        """Divide images whose folders name no split by --split, as in the corpus `images`."""
        batches = self._batches(source)
        if not batches:
            if not (labels := images.shared_out(source, settings)):
                labels = images.splits_by_folder(source)
                if "test" not in labels:  # validation is the official one
                    tests = ["test" if name == "validation" else name for name in labels]
                    labels = images.hold_out(tests, self.VALIDATION_EVERY)
            return images.labelled(source, labels)
        if settings["split"] is not None:
            raise ConfigError("--split", "the official batches are split already", "Leave it out")
        train, test = (
            [batch for batch in batches if _stem(batch).startswith("train") is part] for part in (True, False)
        )
        streams = {
            "train": _rows(train, lambda image: (image + 1) % self.VALIDATION_EVERY != 0),
            "validation": _rows(train, lambda image: (image + 1) % self.VALIDATION_EVERY == 0),
            "test": _rows(test, lambda image: image >= 0),
        }
        return ((name, [stream]) for name, stream in streams.items())

    def _batches(self, source: Source) -> list[NumberBatch]:
        """Return the sorted batches of a source. Raises DataError for pickled ones and other files."""
        batches: list[NumberBatch] = []
        others: list[Part] = []
        for part in source.parts:
            name = PurePosixPath(part.name).name
            if PICKLED_NPZ.match(name):
                raise DataError(part, "this batch is a pickle, which could run anything", "Give the npz version")
            names = npz_batches(part.path) if name.endswith((".npz", ".zip")) else []
            batches += [(part.path, batch) for batch in names]
            others += [] if names else [part]
        if batches and others:
            raise DataError(others[0], "this is no npz batch, as others are", "Leave it out of --source")
        return sorted(batches, key=lambda batch: natural(_stem(batch)))


def _stem(batch: NumberBatch) -> str:
    return PurePosixPath(batch[1]).name


def _rows(batches: Sequence[NumberBatch], select: Callable[[np.ndarray], np.ndarray]) -> Iterator[bytes]:
    """Yield the images of batches whose number, counted through all of them, is selected."""
    first = 0
    for path, name in batches:
        for piece in npz_rows(path, name, 3 * IMAGENET_SIDE**2):
            planes = np.frombuffer(piece, dtype=np.uint8).reshape(-1, 3 * IMAGENET_SIDE**2)
            keep = select(np.arange(first, first + len(planes)))
            first += len(planes)
            if keep.any():
                yield planar_piece(planes[keep].tobytes())


def npz_batches(path: Path) -> list[str]:
    """Return the names of the npz batches in a zip archive, none if it holds images; of an npz file its own."""
    with images.unpacking(path):
        names = open_zip(path).namelist()
    if ARRAY in names:
        return [path.name]
    batches = [name for name in names if name.endswith(".npz")]
    if not batches and not any(name.lower().endswith(images.SUFFIXES) for name in names):
        some = ", ".join(names[:3])
        raise DataError(path, f"there is no npz batch here ({some})", "Give the npz version: others are pickles")
    return batches


def npz_rows(path: Path, batch: str, numbers: int) -> Iterator[bytes]:
    """Yield the rows of the array `data` of a batch, uint8 (N, D), up to 1 MiB of whole rows at a time.

    Raises DataError for an array of another type (objects among them, which are pickled) or another D than `numbers`.
    """
    shown = f"{path}: {batch}" if batch != path.name else str(path)
    with ExitStack() as stack:
        with images.unpacking(path):
            archive = open_zip(path)
            if batch != path.name:
                archive = stack.enter_context(ZipFile(stack.enter_context(archive.open(batch))))
            stream = stack.enter_context(archive.open(ARRAY))
            is_first = npy.read_magic(stream) == (1, 0)
            shape, by_columns, kind = (npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0)(stream)
        if kind != np.uint8 or by_columns or len(shape) != 2 or shape[1] != numbers:
            problem = f"its `data` is {kind} {shape}, uint8 (images, {numbers}) is expected"
            raise DataError(shown, problem, "Give the official batches of 64×64 pixels")
        size = max(1, PIECE // numbers)
        for start in range(0, shape[0], size):
            with images.unpacking(path):
                expected = min(size, shape[0] - start) * numbers
                piece = stream.read(expected)
                if len(piece) < expected:
                    raise EOFError(f"{batch} ends early")
            yield piece


def verify_official(source: Source, published: Mapping[str, str]) -> list[str]:
    """Return the names of the official files. Raises DataError for another file of such a name.

    published: md5 or sha256 by name of the file.
    """
    verified = []
    for part in source.parts:
        name = PurePosixPath(part.name).name
        if name in published:
            kind = "md5" if len(published[name]) == 32 else "sha256"
            digest = hashlib.new(kind, usedforsecurity=False)
            for piece in part.pieces():
                digest.update(piece)
            if (hexdigest := digest.hexdigest()) != published[name]:
                raise DataError(
                    part, f"its {kind} is {hexdigest[:12]}…, not {published[name][:12]}…", "Get it again, or rename it"
                )
            verified.append(name)
    return verified
