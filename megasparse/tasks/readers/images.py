"""Images as sequences of grey pixels (Long Range Arena, Tay et al. 2021): CIFAR-10 and Pathfinder."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megasparse.data.corpora.images import MOST_BYTES, SUFFIXES, decode
from megasparse.errors import DataError
from megasparse.files import natural
from megasparse.tasks.readers.rows import Rows, lines, whole_bytes
from megasparse.tasks.task import Example, SourceLocation, Task, examples_of

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
WEIGHTS = (2989, 5870, 1140)  # of red, green and blue, in ten-thousandths


def image(file: Path) -> np.ndarray:
    """Decode an image file to uint8 (32, 32, 3): red, green and blue. Raises DataError for other files."""
    pixels = decode(str(file), whole_bytes(file, MOST_BYTES), SIDE)
    return np.frombuffer(pixels, dtype=np.uint8).reshape(SIDE, SIDE, 3)


def class_folders(folder: Path) -> Rows:
    """Read the images in CLASS/*.png or *.jpg, class by class, in the order of the numbers in their names."""
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    for name in (*CIFAR10, *sorted(names - {*CIFAR10})):
        paths = [path for path in (folder / name).glob("*") if path.name.lower().endswith(SUFFIXES)]
        if name not in names or not paths:
            raise DataError(folder / name, "contains no images", f"Use a folder of each class: {', '.join(CIFAR10)}")
        for path in sorted(paths, key=lambda path: natural(path.name)):
            yield SourceLocation(path), {"img": image(path), "label": name, "id": f"{name}/{path.stem}"}


def grey_pixels(row: dict[str, Any]) -> np.ndarray:
    """Return the grey values of `img`, int64 (1024,), row by row. Raises ValueError for another size."""
    colours = np.asarray(row["img"])
    if colours.shape != (SIDE, SIDE, 3) or colours.dtype != np.uint8:
        raise ValueError(f"an image of {colours.shape} {colours.dtype} instead of ({SIDE}, {SIDE}, 3) uint8")
    return grey(colours)


def grey(colours: np.ndarray) -> np.ndarray:
    """Convert uint8 (..., 3), red, green and blue, to the grey values of all pixels, flat int64 in 0 … 255.

    ⌊(0.2989·R + 0.5870·G + 0.1140·B)·255.5/255⌋, the rounding of TensorFlow's rgb_to_grayscale in Tay et al., without
    floating point (float32 is off by 1 for 237 of the 256³ colours). Grey pixels keep their value.
    """
    return (colours.astype(np.int64) @ np.array(WEIGHTS) * 511 // (510 * 10_000)).reshape(-1)


LEVELS = ("curv_baseline", "curv_contour_length_9", "curv_contour_length_14")
LINE = re.compile(r"(imgs/[0-9]+) (sample_[0-9]+\.png) [^ ]* ([^ ]*)( .*)?")


class Pathfinder(Task):
    """Pathfinder of Long Range Arena (Linsley et al. 2018; Tay et al. 2021): are two dots joined by a dashed path?

    Official files: one level's folder in lra_release/pathfinder32, with metadata/N.npy and imgs/N/sample_M.png, 32×32
    grey pixels, read row by row. Despite their names, metadata files are text, one line per image: `imgs/N sample_M.png
    M LABEL` and drawing settings.

    Tay et al. train on the first 80 % of a level's images, validate on the next 10 % and test on the rest, in the
    shuffled order of their conversion. Here the split is by metadata files in numeric order. Both skip images with an
    empty file.
    """

    name, metrics, vocabulary, classes = "pathfinder", ("accuracy",), 256, ("0", "1")

    def files(self, folder: Path) -> dict[str, list[Path]]:
        """Return the metadata files by split. Raises DataError for the folder of all levels."""
        if levels := [level for level in LEVELS if (folder / level).is_dir()]:
            raise DataError(folder, f"contains {len(levels)} levels", f"Use one of them: {folder / levels[-1]}")
        paths = sorted((folder / "metadata").glob("*.npy"), key=lambda path: natural(path.name))
        first, second = len(paths) * 8 // 10, len(paths) * 9 // 10
        splits = {"train": paths[:first], "validation": paths[first:second], "test": paths[second:]}
        return {split: files for split, files in splits.items() if files}

    def read(self, file: Path) -> Iterator[Example]:
        if whole_bytes(file).startswith(b"\x93NUMPY"):
            raise DataError(file, "a numpy array, which can contain pickles", "Use lra_release's, which is text")
        return examples_of(file, lines(file), self.example)

    def example(self, row: str, location: SourceLocation, number: str) -> Example:
        if (match := LINE.fullmatch(row)) is None:
            raise DataError(location, f'"{row[:80]}" is not a line of metadata', "Write: imgs/0 sample_7.png 7 1")
        folder, name, label, _ = match.groups()
        path = location.file.parent.parent / folder / name
        if not path.is_file() or not path.stat().st_size:
            raise DataError(location, f"{path} is missing or empty", "Unpack lra_release again, or delete this line")
        colours = image(path)
        if (colours != colours[..., :1]).any():
            raise DataError(path, "the image is not grey", "Convert it to grey")
        pixels = colours[..., 0].astype(np.int64).reshape(-1)
        return Example((pixels,), self.class_of(label, location), location, f"{folder}/{name}")
