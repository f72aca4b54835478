"""Image files as arrays, for tasks that read pixels. S side of an image."""

from pathlib import Path

import numpy as np

from megasparse.data.corpora.pixels import MOST_BYTES, decode
from megasparse.errors import DataError


def image(file: Path, side: int) -> np.ndarray:
    """The pixels of an image file, uint8 (S, S, 3): red, green and blue.

    Raises DataError naming a file that cannot be read, is damaged, of another size, or not of 8 bits a colour.
    """
    try:
        with open(file, "rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise DataError(file, f"cannot be read ({error.strerror})", "Get it again, or leave it out") from None
    return np.frombuffer(decode(str(file), content, side), dtype=np.uint8).reshape(side, side, 3)
