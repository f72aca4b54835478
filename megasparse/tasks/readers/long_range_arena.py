"""The tasks of the Long Range Arena (Tay et al. 2021): ListOps, bytes of reviews and papers, pixels.

ListOps' generator is LRA's: trees of MIN, MAX, MED and SM over digits.
"""

import hashlib
import random
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from tqdm import tqdm

from megasparse.data.corpora.image_sets import BATCHES, PICKLED, RECORD, RECORDS, SIDE
from megasparse.data.corpora.images import MOST_BYTES, SUFFIXES, decode
from megasparse.errors import ConfigError, DataError
from megasparse.files import natural
from megasparse.hub.tensor_file import appearing
from megasparse.tasks.readers.rows import RowTask, field, lines, whole_bytes, whole_text
from megasparse.tasks.task import Example, Skipping, SourceLocation, Task, existing


def image(file: Path, side: int) -> np.ndarray:
    """Return the pixels of an image file, uint8 (S, S, 3): red, green and blue.

    Raises DataError naming a file that cannot be read, is damaged, of another size, or not of 8 bits a colour.
    """
    try:
        with open(file, "rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise DataError(file, f"cannot be read ({error.strerror})", "Get it again, or leave it out") from None
    return np.frombuffer(decode(str(file), content, side), dtype=np.uint8).reshape(side, side, 3)


DIGITS = tuple("0123456789")
OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
"""Operators on digits, whose values are digits."""
END = "]"
TOKENS = (*DIGITS, *OPERATORS, END)
"""Tokens by id."""
IDS = {token: number for number, token in enumerate(TOKENS)}
PARENTHESES = ("(", ")")


class ListOps(RowTask):
    """ListOps of Long Range Arena (Nangia & Bowman 2018; Tay et al. 2021): the value of a nested operation on digits.

    Official files: basic_train.tsv, basic_val.tsv and basic_test.tsv, which megasparse listops makes, with the columns
    Source, such as `( ( ( [MAX 2 ) 9 ) ] )`, and Target. The parentheses, which only repeat what the brackets say, are
    left out: what remains is 0–9, [MIN, [MAX, [MED, [SM and ], at most 1,999 tokens, as Tay et al. describe the task.
    Their published input pipeline also lost every bracket; its authors called that an error (the value depends on
    them).
    """

    name = "listops"
    metrics = ("accuracy",)
    vocabulary = len(TOKENS)
    classes = DIGITS
    official: ClassVar = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}

    def example(self, row: dict[str, str], location: SourceLocation, number: str) -> Example:
        source, target = field(row, "Source", location), field(row, "Target", location)
        tokens = [token for token in source.split() if token not in PARENTHESES]
        if unknown := [token for token in tokens if token not in IDS]:
            problem = f'Source has "{unknown[0][:80]}", which is no token of ListOps'
            raise DataError(str(location), problem, f"Its tokens are: ( ) {' '.join(TOKENS)}")
        ids = np.array([IDS[token] for token in tokens], dtype=np.int64)
        return Example((ids,), self.class_of(target, location), location, number)


OPERATOR_PROBABILITY = 0.25
MOST_TRIES = 100_000
"""Trees drawn in a row without a new one of the right length. With the default sizes, one of 15 is."""


class Sizes(NamedTuple):
    """Sizes of the trees that are examples."""

    min_length: int
    max_length: int
    """Tokens between these two, which are excluded."""
    max_depth: int
    """Nodes from the root to a digit, both included, at most."""
    max_args: int


def write_listops(output: Path, numbers: dict[str, int], sizes: Sizes, seed: int) -> None:
    """Write a folder with a file for each of `numbers` (name -> examples), which no two files share.

    Raises ConfigError where there are too few different trees, HubError where `output` exists or cannot be written.
    """
    examples = distinct(random.Random(seed), sizes)
    with appearing(output) as folder, tqdm(total=sum(numbers.values()), unit="tree", disable=None) as progress:
        for name, count in numbers.items():
            with open(folder / name, "w", encoding="utf-8", newline="\n") as stream:
                stream.write("Source\tTarget\n")
                for _ in range(count):
                    source, target = next(examples)
                    stream.write(f"{source}\t{target}\n")
                    progress.update()


def distinct(draw: random.Random, sizes: Sizes) -> Iterator[tuple[str, int]]:
    """Draw source and target of one example after another, none twice. Raises ConfigError if no more are found."""
    digests = set()
    tries = 0
    while tries < MOST_TRIES:
        tries += 1
        if (example := tree(draw, sizes)) is None:
            continue
        digest = hashlib.blake2b(example[0].encode(), digest_size=16).digest()
        if digest not in digests:
            digests.add(digest)
            tries = 0
            yield example
    problem = f"{sizes.max_length}, with the other options, leaves too few trees: {len(digests):,} were found"
    raise ConfigError("--max-length", problem, "Allow more lengths, more depth or more arguments, or ask for fewer")


def tree(draw: random.Random, sizes: Sizes) -> tuple[str, int] | None:
    """Draw one tree, as text, and its value; None if its length is out of bounds, which ends the drawing early."""
    parts: list[str] = []
    length = 0
    unfinished: list[tuple[str, int, list[int]]] = []  # operators, their numbers of arguments, the values so far
    while length < sizes.max_length:
        if len(unfinished) + 1 < sizes.max_depth and draw.random() < OPERATOR_PROBABILITY:
            arguments = 2 + _below(draw, sizes.max_args - 1)
            operator = [*OPERATORS][_below(draw, len(OPERATORS))]
            parts += ["("] * (arguments + 1) + [operator]
            unfinished.append((operator, arguments, []))
            length += 2  # its end too
            continue
        value = _below(draw, len(DIGITS))
        parts.append(DIGITS[value])
        length += 1
        while unfinished:
            operator, arguments, values = unfinished[-1]
            parts.append(")")
            values.append(value)
            if len(values) < arguments:
                break
            parts += [END, ")"]
            value = OPERATORS[operator](values)
            unfinished.pop()
        if not unfinished:
            return (" ".join(parts), value) if sizes.min_length < length < sizes.max_length else None
    return None


def _below(draw: random.Random, number: int) -> int:
    """Draw a number of 0 … number − 1. Only `random.random` is promised to stay the same in later Pythons."""
    return int(draw.random() * number)


class ByteIMDb(Task):
    """Byte-level text classification of Long Range Arena (Tay et al. 2021): film reviews of IMDb (Maas et al. 2011).

    Official files: aclImdb/{train,test}/{neg,pos}/*.txt, 12,500 each, one review a file. A review is read as it stands,
    and seen as bytes where the model's tokenizer is `bytes`. Tay et al. validate on the test set, as IMDb has no other;
    that would choose the checkpoint by the test set, so there is no split `validation` here and a part of `train` is
    held out.
    """

    name = "byte_imdb"
    metrics = ("accuracy",)
    classes = ("neg", "pos")
    official: ClassVar = {"train": "train", "test": "test"}

    def read(self, file: Path) -> Iterator[Example]:
        """Read the reviews of a folder with neg and pos: first neg's, each class by the numbers in the files' names."""
        with self.skipping(file) as skipping:
            for label, name in enumerate(self.classes):
                reviews = sorted((file / name).glob("*.txt"), key=lambda path: natural(path.name))
                if not reviews:
                    raise DataError(file / name, "holds no *.txt", "Give a folder with neg/*.txt and pos/*.txt")
                skipping.rows += len(reviews)
                for review in reviews:
                    with skipping:
                        yield Example((whole_text(review),), label, SourceLocation(review), f"{name}/{review.stem}")


NUMBERS = {"0.0": "0", "1.0": "1"}


class AAN(RowTask):
    """Document retrieval of Long Range Arena (Tay et al. 2021): does one paper of the ACL Anthology Network cite the
    other?

    Official files: new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv and new_aan_pairs.test.tsv of lra_release/tsv_data:
    a label (0 or 1, also written 0.0 or 1.0), two ids and two texts between tabs, without a header. The texts there are
    as Python shows bytes, b'...', with escapes such as \n and \xe2. They are read as they stand, which is what Tay et
    al.'s input pipeline does, so these quotation marks and escapes are part of what the model reads.
    """

    name = "aan"
    metrics = ("accuracy",)
    segments = 2
    towers = True
    classes = ("0", "1")
    official: ClassVar = {
        "train": "new_aan_pairs.train.tsv",
        "validation": "new_aan_pairs.eval.tsv",
        "test": "new_aan_pairs.test.tsv",
    }
    columns = ("label", "id1", "id2", "text1", "text2")

    def example(self, row: dict[str, str], location: SourceLocation, number: str) -> Example:
        label = self.class_of(NUMBERS.get(row["label"], row["label"]), location)
        return Example((row["text1"], row["text2"]), label, location, f"{row['id1']} {row['id2']}")


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


class Pathfinder(RowTask):
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

    def rows(self, file: Path, skipping: Skipping) -> Iterator[tuple[SourceLocation, str]]:
        if whole_bytes(file).startswith(NUMPY):
            problem = "this is a numpy array, which can hold pickles, and those could run anything when they are read"
            raise DataError(file, problem, "Give lra_release's, which is text, or write text: imgs/0 sample_7.png 7 1")
        return lines(file, skipping)

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
