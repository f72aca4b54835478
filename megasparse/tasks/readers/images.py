"""Images as sequences of grey pixels (Long Range Arena, Tay et al. 2021): CIFAR-10 and Pathfinder."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megasparse.data.corpora.image_sets import BATCHES, PICKLED, RECORD, RECORDS, SIDE
from megasparse.data.corpora.images import MOST_BYTES, SUFFIXES, decode
from megasparse.errors import DataError
from megasparse.files import natural, open_file
from megasparse.tasks.readers.rows import lines, whole_bytes
from megasparse.tasks.task import Example, SourceLocation, Task, examples_of, existing


def image(file: Path, side: int) -> np.ndarray:
    """Return the pixels of an image file, uint8 (S, S, 3): red, green and blue.

    Raises DataError naming a file that cannot be read, is damaged, of another size, or not of 8 bits a colour.
    """
    try:
        with open_file(file) as stream:
            content = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise DataError(file, f"cannot be read ({error.strerror})", "Get it again, or leave it out") from None
    return np.frombuffer(decode(str(file), content, side), dtype=np.uint8).reshape(side, side, 3)


OFFICIAL_FOLDER, PICKLED_FOLDER = "cifar-10-batches-bin", "cifar-10-batches-py"
WEIGHTS = (2989, 5870, 1140)
"""Weights of red, green and blue, in ten-thousandths."""


class GreyCIFAR10(Task):
    """Image classification of Long Range Arena (Tay et al. 2021): CIFAR-10 (Krizhevsky 2009) as 1,024 grey pixels.

    Official files: the binary version, data_batch_1.bin … data_batch_5.bin and test_batch.bin, in the folder given or
    in its cifar-10-batches-bin. Images of one's own, or unpacked ones, lie in {train,test}/CLASS/*.png or *.jpg. Pixels
    are read in rows from the top, each from the left.

    Tay et al. hold out the last tenth of the training images, in an order that is shuffled before. So there is no split
    `validation` here: `task.validation_fraction`, 0.1, holds out as many, 5,000, at random.
    """

    name = "grey_cifar10"
    metrics = ("accuracy",)
    vocabulary = 256
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def files(self, folder: Path) -> dict[str, list[Path]]:
        """Return the official batches, else folders of images. Raises DataError for the pickled version."""
        for path in (*folder.glob("*_batch*"), *folder.glob(f"{PICKLED_FOLDER}/*_batch*")):
            if PICKLED.match(path.name):
                problem = "this batch is a pickle, which could run anything when it is read"
                raise DataError(path, problem, "Give the binary version, cifar-10-binary.tar.gz")
        *train, test = BATCHES
        official = existing(folder, {"train": train, "test": test}, OFFICIAL_FOLDER)
        return official or existing(folder, {"train": "train", "test": "test"})

    def read(self, file: Path) -> Iterator[Example]:
        """Read the images of a batch in its order; of a folder class by class, by the numbers in their names."""
        return self._images(file) if file.is_dir() else self._records(file)

    def _records(self, file: Path) -> Iterator[Example]:
        data = whole_bytes(file)
        if len(data) % RECORD or (file.name in BATCHES and len(data) != RECORDS * RECORD):
            whole = f"{RECORDS * RECORD:,}" if file.name in BATCHES else f"a multiple of {RECORD:,}"
            hint = "Get it again: it is damaged, or of another data set"
            raise DataError(file, f"this batch has {len(data):,} bytes, {whole} are expected", hint)
        for number, record in enumerate(np.frombuffer(data, dtype=np.uint8).reshape(-1, RECORD)):
            location, label = SourceLocation(file, number + 1), int(record[0])
            if label >= len(self.classes):
                problem = f"the label {label} is none of 0 … {len(self.classes) - 1}"
                raise DataError(str(location), problem, "Get the file again: it is damaged")
            yield Example((grey(record[1:].reshape(3, SIDE * SIDE).T),), label, location, str(number))

    def _images(self, folder: Path) -> Iterator[Example]:
        for name in sorted(path.name for path in folder.iterdir() if path.is_dir()):
            self.class_of(name, SourceLocation(folder / name))
        for label, name in enumerate(self.classes):
            paths = [path for path in (folder / name).glob("*") if path.name.lower().endswith(SUFFIXES)]
            if not paths:
                hint = f"Give a folder with one folder of images for each class: {', '.join(self.classes)}"
                raise DataError(folder / name, "holds no images", hint)
            for path in sorted(paths, key=lambda path: natural(path.name)):
                yield Example((grey(image(path, SIDE)),), label, SourceLocation(path), f"{name}/{path.stem}")


def grey(colours: np.ndarray) -> np.ndarray:
    """Turn uint8 (..., 3), red, green and blue, into the grey values, int64 in 0 … 255, of all pixels in one row.

    ⌊(0.2989·R + 0.5870·G + 0.1140·B)·255.5/255⌋, as TensorFlow's rgb_to_grayscale rounds it for Tay et al., here
    without floating point (float32 is 1 off for 237 of the 256³ colours): grey pixels keep their value.
    """
    weighted = colours.astype(np.int64) @ np.array(WEIGHTS)
    return (weighted * 511 // (510 * 10_000)).reshape(-1)


LEVELS = ("curv_baseline", "curv_contour_length_9", "curv_contour_length_14")
PATHFINDER_SIDE = 32
NUMPY = b"\x93NUMPY"
FOLDER, FILE = re.compile(r"imgs/[0-9]+"), re.compile(r"sample_[0-9]+\.png")


class Pathfinder(Task):
    """Pathfinder of Long Range Arena (Linsley et al. 2018; Tay et al. 2021): are two dots joined by a dashed path?

    Official files: of lra_release/pathfinder32 one level's folder, such as curv_contour_length_14, which Tay et al.
    report ("hard"): metadata/N.npy and imgs/N/sample_M.png, 32×32 grey pixels, read in rows from the top. Metadata are
    text in spite of their names, a line an image: `imgs/N sample_M.png M LABEL` and the drawing's settings, spaces
    between.

    Tay et al. train on the first 80 % of a level's images, validate on the next 10 % and test on the last, in the
    shuffled order of their conversion. Here it is so of the metadata files in the order of their numbers (of 200 with
    1,000 images each 160, 20 and 20); the labels in them were drawn image by image. They pass over images whose file is
    empty, as one of curv_baseline is; so does this reader.
    """

    name = "pathfinder"
    metrics = ("accuracy",)
    vocabulary = 256
    classes = ("0", "1")

    def files(self, folder: Path) -> dict[str, list[Path]]:
        """Return the metadata files by split. Raises DataError for the folder of all levels: a run reads one."""
        levels = [level for level in LEVELS if (folder / level).is_dir()]
        if levels:
            hint = f"Give one of them: {folder / levels[-1]}"
            raise DataError(folder, f"has {len(levels)} levels, of which a run reads one", hint)
        paths = sorted((folder / "metadata").glob("*.npy"), key=lambda path: natural(path.name))
        first, second = len(paths) * 8 // 10, len(paths) * 9 // 10
        splits = {"train": paths[:first], "validation": paths[first:second], "test": paths[second:]}
        return {split: files for split, files in splits.items() if files}

    def read(self, file: Path) -> Iterator[Example]:
        if whole_bytes(file).startswith(NUMPY):
            problem = "this is a numpy array, which can hold pickles, and those could run anything when they are read"
            raise DataError(file, problem, "Give lra_release's, which is text, or write text: imgs/0 sample_7.png 7 1")
        return examples_of(file, lines(file), self.example)

    def example(self, row: str, location: SourceLocation, number: str) -> Example:
        fields = row.split(" ")
        if len(fields) < 4 or not FOLDER.fullmatch(fields[0]) or not FILE.fullmatch(fields[1]):
            hint = "Write: imgs/0 sample_7.png 7 1"
            raise DataError(str(location), f'"{row[:80]}" is no line of metadata', hint)
        folder, name, _, label = fields[:4]
        path = location.file.parent.parent / folder / name
        if not path.is_file():
            raise DataError(str(location), f"{path} is not there", "Unpack lra_release again, or delete this line")
        if not path.stat().st_size:
            hint = "Delete this line: Long Range Arena leaves such images out"
            raise DataError(str(location), f"{path} is empty", hint)
        colours = image(path, PATHFINDER_SIDE)
        if (colours != colours[..., :1]).any():
            raise DataError(path, "this image has colours, grey is expected", "Convert it to grey")
        pixels = colours[..., 0].astype(np.int64).reshape(-1)
        return Example((pixels,), self.class_of(label, location), location, f"{folder}/{name}")
