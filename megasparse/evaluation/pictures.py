"""Pictures out of tokens and tokens out of pictures, PNG files, and sheets of many pictures.

T tokens of an image, s its side, C channels: token i is a sub-pixel value, by rows, columns, channels.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from megasparse.data.corpora.pixels import MOST_BYTES, decode
from megasparse.data.files import replacing
from megasparse.errors import ConfigError, DataError

Picture = np.ndarray
"""(s, s, 3) uint8."""

GAP = 4  # pixels between the pictures of a sheet
HEADING = 16  # pixels for a line of text
LABEL = 48  # pixels for a word beside a row
SHEET_SIDE = 128  # smaller pictures are enlarged on a sheet, by a whole number
BACKGROUND = (96, 96, 96)  # neither black nor white, which pictures often are at their borders


class Shape(NamedTuple):
    side: int
    channels: int
    """3: red, green and blue. 1: grey."""

    @property
    def tokens(self) -> int:
        return self.side**2 * self.channels

    @property
    def given(self) -> int:
        """Tokens of the upper half, the middle row of an odd number of rows not among them."""
        return self.side // 2 * self.side * self.channels


def image_shape(tokens: int) -> Shape:
    """The shape of images of T = 3·s² (RGB) or s² (grey) tokens. Raises ConfigError for any other number."""
    for channels in (3, 1):
        side = math.isqrt(tokens // channels)
        if side and side**2 * channels == tokens:
            return Shape(side, channels)
    raise ConfigError(
        "data.sequence_length",
        f"{tokens} is neither 3·s² nor s², so its pixels make no square image",
        "Give the tokens of one image, such as 12288 for 64×64 RGB",
    )


def picture_of(tokens: Sequence[int] | Tensor, shape: Shape) -> Picture:
    """The picture of an image's first tokens; the missing ones are black."""
    flat = np.zeros(shape.tokens, dtype=np.uint8)
    flat[: len(tokens)] = np.asarray(tokens, dtype=np.uint8)
    return np.broadcast_to(flat.reshape(shape.side, shape.side, shape.channels), (shape.side, shape.side, 3))


def read_picture(path: str | Path, shape: Shape) -> Tensor:
    """The tokens (T,) int64 of an image file. Nothing is scaled and no colour left out: raises DataError for an image
    of another size, for one in colour where the model's are grey, and where it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", "Give the path of an image file") from None
    pixels = np.frombuffer(decode(str(path), content, shape.side), dtype=np.uint8).reshape(-1, 3).astype(np.int64)
    if shape.channels == 1 and (pixels != pixels[:, :1]).any():
        raise DataError(path, "this image has colours, but the model's are grey", "Convert it to grey")
    return torch.from_numpy(pixels[:, : shape.channels]).flatten()


def write_png(path: Path, picture: Picture) -> None:
    """Write a picture's file whole or not at all."""
    with replacing(path) as file:
        Image.fromarray(np.ascontiguousarray(picture)).save(file, format="PNG")


def sheet(
    rows: Sequence[Sequence[Picture]],
    headings: Sequence[str] = (),
    labels: Sequence[str] = (),
    foot: Sequence[str] = (),
) -> Picture:
    """A grid of pictures of one size, small ones enlarged. headings: words over columns; labels: words beside rows;
    foot: lines below.
    """
    side, columns = rows[0][0].shape[0], max(len(row) for row in rows)
    scale = max(1, SHEET_SIDE // side)
    cell, top, left = side * scale + GAP, HEADING if headings else 0, LABEL if labels else 0
    bottom = top + GAP + len(rows) * cell
    drawn = Image.new("RGB", (left + GAP + columns * cell, bottom + len(foot) * HEADING), BACKGROUND)
    for number, line in enumerate(foot):
        ImageDraw.Draw(drawn).text((GAP, bottom + number * HEADING), line, fill=(255, 255, 255))
    for column, heading in enumerate(headings):
        ImageDraw.Draw(drawn).text((left + GAP + column * cell, 2), heading, fill=(255, 255, 255))
    for row, label in enumerate(labels):
        ImageDraw.Draw(drawn).text((GAP, top + GAP + row * cell), label, fill=(255, 255, 255))
    for y, pictures in enumerate(rows):
        for x, picture in enumerate(pictures):
            enlarged = np.kron(picture, np.ones((scale, scale, 1), dtype=np.uint8))
            drawn.paste(Image.fromarray(enlarged), (left + GAP + x * cell, top + GAP + y * cell))
    return np.asarray(drawn)


def grid(pictures: Sequence[Picture]) -> list[Sequence[Picture]]:
    """Rows of pictures, as near to a square as can be."""
    columns = math.ceil(len(pictures) ** 0.5)
    return [pictures[first : first + columns] for first in range(0, len(pictures), columns)]
