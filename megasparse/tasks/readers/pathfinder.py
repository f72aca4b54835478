"""Pathfinder of Long Range Arena (Linsley et al. 2018; Tay et al. 2021): are two dots joined by a dashed path?

Official files: of lra_release/pathfinder32 one level's folder, such as curv_contour_length_14, which Tay et al. report
("hard"): metadata/N.npy and imgs/N/sample_M.png, 32×32 grey pixels, read in rows from the top. Metadata are text in
spite of their names, a line an image: `imgs/N sample_M.png M LABEL` and the drawing's settings, spaces between.

Tay et al. train on the first 80 % of a level's images, validate on the next 10 % and test on the last, in the shuffled
order of their conversion. Here it is so of the metadata files in the order of their numbers (of 200 with 1,000 images
each 160, 20 and 20); the labels in them were drawn image by image. They pass over images whose file is empty, as one of
curv_baseline is; so does `task.max_skipped` here.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megasparse.data.corpora.number_files import natural
from megasparse.errors import DataError
from megasparse.tasks.readers.images import image
from megasparse.tasks.readers.rows import RowTask, lines
from megasparse.tasks.skipping import Skipping
from megasparse.tasks.task import Example, SourceLocation

LEVELS = ("curv_baseline", "curv_contour_length_9", "curv_contour_length_14")
SIDE = 32
NUMPY = b"\x93NUMPY"
FOLDER, FILE = re.compile(r"imgs/[0-9]+"), re.compile(r"sample_[0-9]+\.png")


class Pathfinder(RowTask):
    name = "pathfinder"
    metrics = ("accuracy",)
    vocabulary = 256
    classes = ("0", "1")

    def files(self, folder: Path) -> dict[str, list[Path]]:
        """The metadata files by split. Raises DataError for the folder of all levels: a run reads one of them."""
        levels = [level for level in LEVELS if (folder / level).is_dir()]
        if levels:
            hint = f"Give one of them: {folder / levels[-1]}"
            raise DataError(folder, f"has {len(levels)} levels, of which a run reads one", hint)
        found = sorted((folder / "metadata").glob("*.npy"), key=lambda path: natural(path.name))
        first, second = len(found) * 8 // 10, len(found) * 9 // 10
        splits = {"train": found[:first], "validation": found[first:second], "test": found[second:]}
        return {split: files for split, files in splits.items() if files}

    def rows(self, file: Path, skipping: Skipping) -> Iterator[tuple[SourceLocation, str]]:
        _refuse_arrays(file)
        return lines(file, skipping)

    def example(self, row: str, location: SourceLocation, number: str) -> Example:
        fields = row.split(" ")
        if len(fields) < 4 or not FOLDER.fullmatch(fields[0]) or not FILE.fullmatch(fields[1]):
            hint = "Write: imgs/0 sample_7.png 7 1"
            raise DataError(str(location), f'"{row[:80]}" is no line of metadata', hint)
        folder, name, _, label = fields[:4]
        pixels = _pixels(location.file.parent.parent / folder / name, location)
        return Example((pixels,), self.class_of(label, location), location, f"{folder}/{name}")


def _refuse_arrays(file: Path) -> None:
    try:
        with open(file, "rb") as stream:
            begin = stream.read(len(NUMPY))
    except OSError as error:
        raise DataError(file, f"cannot be read ({error.strerror})", "Give a file of metadata") from None
    if begin == NUMPY:
        problem = "this is a numpy array, which can hold pickles, and those could run anything when they are read"
        raise DataError(file, problem, "Give lra_release's, which is text, or write text: imgs/0 sample_7.png 7 1")


def _pixels(path: Path, location: SourceLocation) -> np.ndarray:
    """The grey values of an image, int64 (1024,)."""
    if not path.is_file():
        raise DataError(str(location), f"{path} is not there", "Unpack lra_release again, or delete this line")
    if not path.stat().st_size:
        raise DataError(str(location), f"{path} is empty", "Delete this line: Long Range Arena leaves such images out")
    colours = image(path, SIDE)
    if (colours != colours[..., :1]).any():
        raise DataError(path, "this image has colours, grey is expected", "Convert it to grey")
    return colours[..., 0].astype(np.int64).reshape(-1)
