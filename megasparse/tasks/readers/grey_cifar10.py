"""Image classification of Long Range Arena (Tay et al. 2021): CIFAR-10 (Krizhevsky 2009) as 1,024 grey pixels.

Official files: the binary version, data_batch_1.bin … data_batch_5.bin and test_batch.bin, in the folder given or in
its cifar-10-batches-bin. Images of one's own, or unpacked ones, lie in {train,test}/CLASS/*.png or *.jpg. Pixels are
read in rows from the top, each from the left.

Tay et al. hold out the last tenth of the training images, in an order that is shuffled before. So there is no split
`validation` here: `task.validation_fraction`, 0.1, holds out as many, 5,000, at random.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megasparse.data.corpora.cifar10 import BATCHES, PICKLED, RECORD, RECORDS, SIDE
from megasparse.data.corpora.number_files import natural
from megasparse.data.corpora.pixels import SUFFIXES
from megasparse.errors import DataError
from megasparse.tasks.readers.images import image
from megasparse.tasks.task import Example, SourceLocation, Task, existing

OFFICIAL_FOLDER, PICKLED_FOLDER = "cifar-10-batches-bin", "cifar-10-batches-py"
WEIGHTS = (2989, 5870, 1140)
"""Weights of red, green and blue, in ten-thousandths."""


class GreyCIFAR10(Task):
    name = "grey_cifar10"
    metrics = ("accuracy",)
    vocabulary = 256
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def files(self, folder: Path) -> dict[str, list[Path]]:
        """The official batches, else folders of images. Raises DataError for the pickled version, which is not read."""
        for found in (*folder.glob("*_batch*"), *folder.glob(f"{PICKLED_FOLDER}/*_batch*")):
            if PICKLED.match(found.name):
                problem = "this batch is a pickle, which could run anything when it is read"
                raise DataError(found, problem, "Give the binary version, cifar-10-binary.tar.gz")
        *train, test = BATCHES
        official = existing(folder, {"train": train, "test": test}, OFFICIAL_FOLDER)
        return official or existing(folder, {"train": "train", "test": "test"})

    def read(self, file: Path) -> Iterator[Example]:
        """The images of a batch in its order; of a folder class by class, by the numbers in their names."""
        return self._images(file) if file.is_dir() else self._records(file)

    def _records(self, file: Path) -> Iterator[Example]:
        try:
            with open(file, "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if size % RECORD or (file.name in BATCHES and size != RECORDS * RECORD):
                    whole = f"{RECORDS * RECORD:,}" if file.name in BATCHES else f"a multiple of {RECORD:,}"
                    hint = "Get it again: it is damaged, or of another data set"
                    raise DataError(file, f"this batch has {size:,} bytes, {whole} are expected", hint)
                for number in range(size // RECORD):
                    record = np.frombuffer(stream.read(RECORD), dtype=np.uint8)
                    location, label = SourceLocation(file, number + 1), int(record[0])
                    if label >= len(self.classes):
                        problem = f"the label {label} is none of 0 … {len(self.classes) - 1}"
                        raise DataError(str(location), problem, "Get the file again: it is damaged")
                    planes = record[1:].reshape(3, SIDE * SIDE)
                    yield Example((grey(planes.T),), label, location, str(number))
        except OSError as error:
            raise DataError(file, f"cannot be read ({error.strerror})", "Give a batch of CIFAR-10") from None

    def _images(self, folder: Path) -> Iterator[Example]:
        for name in sorted(each.name for each in folder.iterdir() if each.is_dir()):
            self.class_of(name, SourceLocation(folder / name))
        for label, name in enumerate(self.classes):
            found = [path for path in (folder / name).glob("*") if path.name.lower().endswith(SUFFIXES)]
            if not found:
                hint = f"Give a folder with one folder of images for each class: {', '.join(self.classes)}"
                raise DataError(folder / name, "holds no images", hint)
            for path in sorted(found, key=lambda path: natural(path.name)):
                yield Example((grey(image(path, SIDE)),), label, SourceLocation(path), f"{name}/{path.stem}")


def grey(colours: np.ndarray) -> np.ndarray:
    """Turn uint8 (..., 3), red, green and blue, into the grey values, int64 in 0 … 255, of all pixels in one row.

    ⌊(0.2989·R + 0.5870·G + 0.1140·B)·255.5/255⌋, as TensorFlow's rgb_to_grayscale rounds it for Tay et al., here
    without floating point (float32 is 1 off for 237 of the 256³ colours): grey pixels keep their value.
    """
    weighted = colours.astype(np.int64) @ np.array(WEIGHTS)
    return (weighted * 511 // (510 * 10_000)).reshape(-1)
