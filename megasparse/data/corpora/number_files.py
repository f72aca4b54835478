"""Images in files of numbers: npz batches, as they are or inside a zip archive, a few rows at a time.

numpy's own reader would hold a batch of 1.6 GB; it also knows pickles, which are refused here.

N images, D numbers of each.
"""

import os
import re
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from megasparse.data.corpora.source import UNREADABLE, reason
from megasparse.errors import DataError

PIECE = 1 << 20
ARRAY = "data.npy"


def batches(path: Path) -> list[str]:
    """Names of the npz batches in a zip archive; of an npz file its own.

    Raises DataError where there is none.
    """
    with reading(path), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if ARRAY in names:
        return [path.name]
    found = [name for name in names if name.endswith(".npz")]
    if not found:
        some = ", ".join(ascii(name)[1:-1] for name in names[:3])
        hint = "Give the npz version: batches without a suffix are pickles, which could run anything"
        raise DataError(path, f"there is no npz batch here ({some})", hint)
    return found


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key by which batch_2 comes before batch_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def rows(path: Path, batch: str, numbers: int) -> Iterator[bytes]:
    """The rows of the array `data` of a batch, uint8 (N, D), up to 1 MiB of whole rows at a time.

    Raises DataError for an array of another type (objects among them, which are pickled) or another D than `numbers`.
    """
    shown = f"{os.fspath(path)}: {batch}" if batch != path.name else os.fspath(path)
    with ExitStack() as stack:
        with reading(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            if batch != path.name:
                archive = stack.enter_context(zipfile.ZipFile(stack.enter_context(archive.open(batch))))
            stream = stack.enter_context(archive.open(ARRAY))
            shape, by_columns, kind = _header(stream)
        if kind != np.uint8 or by_columns or len(shape) != 2 or shape[1] != numbers:
            problem = f"its `data` is {kind} {shape}, uint8 (images, {numbers}) is expected"
            raise DataError(shown, problem, "Give the official batches of 64×64 pixels")
        size = max(1, PIECE // numbers)
        for start in range(0, shape[0], size):
            with reading(path):
                wanted = min(size, shape[0] - start) * numbers
                piece = stream.read(wanted)
                if len(piece) < wanted:
                    raise EOFError(f"{batch} ends early")
            yield piece


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether it is stored by columns, and type of an array in npy format."""
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    version = npy.read_magic(stream)
    if version not in read:
        raise ValueError(f"version {version} of the npy format is not known here")
    header: tuple[tuple[int, ...], bool, np.dtype[Any]] = read[version](stream)
    return header


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what damage raises into a DataError that names the file."""
    try:
        yield
    except (*UNREADABLE, ValueError, tarfile.TarError) as error:
        hint = "Get it again: it is damaged or incomplete"
        raise DataError(path, f"this archive cannot be read: {reason(error)}", hint) from None
