"""Image generation with a model of pixels: whole images, or lower halves; conversion between tokens and pictures.

B images per batch, n tokens of a prompt, T tokens of an image, s its side, C channels. Tokens are sub-pixel values,
ordered by row, column, channel.
"""

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from tqdm import tqdm

from megasparse.config.schema import Config
from megasparse.data.corpora.images import MOST_BYTES, decode
from megasparse.errors import ConfigError, DataError
from megasparse.evaluation.bits_per_dim import Stream
from megasparse.evaluation.generate import Sampling, continuations
from megasparse.files import open_file, replacing

Picture = np.ndarray
"""(s, s, 3) uint8."""

GAP = 4  # pixels between the pictures of a sheet
HEADING = 16  # pixels for a line of text
LABEL = 48  # pixels for the label of a row
SHEET_SIDE = 128  # smaller pictures are enlarged on a sheet, by an integer factor
BACKGROUND = (96, 96, 96)  # grey, because borders of pictures are often black or white


class Shape(NamedTuple):
    side: int
    channels: int
    """3: red, green and blue. 1: grey."""

    @property
    def tokens(self) -> int:
        return self.side**2 * self.channels

    @property
    def given(self) -> int:
        """Tokens of the upper half, without the middle row if the number of rows is odd."""
        return self.side // 2 * self.side * self.channels


def image_shape(tokens: int) -> Shape:
    """Return the shape of images of T = 3·s² (RGB) or s² (grey) tokens."""
    for channels in (3, 1):
        side = math.isqrt(tokens // channels)
        if side and side**2 * channels == tokens:
            return Shape(side, channels)
    raise ConfigError(
        "data.sequence_length",
        f"{tokens} is neither 3·s² nor s², so the pixels do not form a square image",
        "Give the tokens of one image, such as 12288 for 64×64 RGB",
    )


def picture_of(tokens: Sequence[int] | Tensor, shape: Shape) -> Picture:
    """Return the picture of an image's first tokens; missing pixels are black."""
    flat = np.zeros(shape.tokens, dtype=np.uint8)
    flat[: len(tokens)] = np.asarray(tokens, dtype=np.uint8)
    return np.broadcast_to(flat.reshape(shape.side, shape.side, shape.channels), (shape.side, shape.side, 3))


def read_picture(path: str | Path, shape: Shape) -> Tensor:
    """Return the tokens (T,) int64 of an image file. Raises DataError if it does not fit the model."""
    unreadable = DataError.instead_of(OSError, path, "cannot be read: {}", "Give the path of an image file")
    with unreadable, open_file(path) as file:
        content = file.read(MOST_BYTES + 1)
    pixels = np.frombuffer(decode(str(path), content, shape.side), dtype=np.uint8).reshape(-1, 3).astype(np.int64)
    if shape.channels == 1 and (pixels != pixels[:, :1]).any():
        raise DataError(path, "this image is in colour, but the model's images are grey", "Convert it to grey")
    return torch.from_numpy(pixels[:, : shape.channels]).flatten()


def write_png(path: Path, picture: Picture) -> None:
    with replacing(path) as file:
        Image.fromarray(picture).save(file, format="PNG")


def sheet(
    rows: Sequence[Sequence[Picture]],
    headings: Sequence[str] = (),
    labels: Sequence[str] = (),
    foot: Sequence[str] = (),
) -> Picture:
    """Return a grid of pictures, enlarged if small. headings: above columns; labels: left of rows;
    foot: lines below.
    """
    side, columns = rows[0][0].shape[0], max(len(row) for row in rows)
    scale = max(1, SHEET_SIDE // side)
    cell, top, left = side * scale + GAP, HEADING if headings else 0, LABEL if labels else 0
    bottom = top + GAP + len(rows) * cell
    image = Image.new("RGB", (left + GAP + columns * cell, bottom + len(foot) * HEADING), BACKGROUND)
    words = [(GAP, bottom + number * HEADING, line) for number, line in enumerate(foot)]
    words += [(left + GAP + column * cell, 2, heading) for column, heading in enumerate(headings)]
    words += [(GAP, top + GAP + row * cell, label) for row, label in enumerate(labels)]
    for x, y, text in words:
        ImageDraw.Draw(image).text((x, y), text, fill=(255, 255, 255))
    for y, pictures in enumerate(rows):
        for x, picture in enumerate(pictures):
            enlarged = np.kron(picture, np.ones((scale, scale, 1), dtype=np.uint8))
            image.paste(Image.fromarray(enlarged), (left + GAP + x * cell, top + GAP + y * cell))
    return np.asarray(image)


def png_bits_per_dim(stream: Stream, length: int, limit: int | None = None) -> float:
    """Return the bits per sub-pixel of optimised PNG files of a split's images, or of its first `limit`. length: tokens
    per image. Raises ConfigError if the split does not consist of whole images.
    """
    shape = image_shape(length)
    if stream.tokens == 0 or stream.tokens % length:
        problem = f"{length} tokens per image do not divide the split's {stream.tokens:,} tokens"
        raise ConfigError("data.sequence_length", problem, "Set it to the tokens of an image")
    count = stream.tokens // length if limit is None else min(limit, stream.tokens // length)
    size = 0
    for first in range(0, count * length, length):
        picture = picture_of(stream.read(first, first + length), shape)
        size += png_size(picture if shape.channels == 3 else picture[:, :, 0])
    return 8 * size / (count * length)


def png_size(picture: np.ndarray) -> int:
    """Return the bytes of the smallest PNG file that Pillow writes for an image (s, s, 3) or (s, s)."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG", optimize=True, compress_level=9)
    return file.tell()


AT_ONCE = 16
"""Images generated in one batch, which bounds the memory of the caches."""
SHEET = "sheet.png"


def shape_of(config: Config, option: str) -> Shape:
    """Return the shape of the images that a model generates. option: named in the ConfigError."""
    if config.data.tokenizer != "pixels" or config.model.kind != "decoder":
        model = f'a {config.model.kind} of data.tokenizer = "{config.data.tokenizer}"'
        raise ConfigError(option, f"this is {model}, which does not predict pixels", 'Give a decoder of "pixels"')
    return image_shape(config.data.sequence_length)


def open_output(directory: str | None) -> Path:
    """Create the output folder. Raises ConfigError unless it is empty: nothing is overwritten."""
    if directory is None:
        raise ConfigError("--output", "it is missing", "Give a new folder for the images")
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        occupied = any(path.iterdir())
    except OSError as error:
        raise ConfigError(
            "--output", f"{path} cannot be created or read ({error.strerror})", "Give a writable folder"
        ) from None
    if occupied:
        raise ConfigError("--output", f"{path} is not empty", "Give a new or an empty folder")
    return path


def draw_images(
    decoder: Any, shape: Shape, count: int, hash_seed: int, sampling: Sampling, directory: str | None
) -> None:
    """Write `count` images and a sheet of all."""
    if count < 1:
        raise ConfigError("--images", f"{count} images cannot be drawn", "Give 1 or more")
    sampling.check()
    output = open_output(directory)
    nothing = torch.empty(count, 0, dtype=torch.long)
    pictures = []
    for number, tokens in enumerate(_drawn(decoder, nothing, shape, hash_seed, sampling)):
        pictures.append(picture_of(tokens, shape))
        write_png(output / f"{number:04}.png", pictures[-1])
    columns = math.ceil(count**0.5)
    write_png(output / SHEET, sheet([pictures[first : first + columns] for first in range(0, count, columns)]))


def complete_images(
    decoder: Any, shape: Shape, files: Sequence[str], hash_seed: int, sampling: Sampling, directory: str | None
) -> None:
    """Write each image with a new lower half, named by its number and file, and a sheet of originals, upper halves and
    completions.
    """
    sampling.check()
    originals = torch.stack([read_picture(file, shape) for file in files])
    halves, output = originals[:, : shape.given], open_output(directory)
    rows: list[list[Picture]] = []
    for number, tokens in enumerate(_drawn(decoder, halves, shape, hash_seed, sampling)):
        row = [picture_of(image, shape) for image in (originals[number], halves[number], tokens)]
        write_png(output / f"{number:04}_{Path(files[number]).stem}.png", row[-1])
        rows.append(row)
    write_png(output / SHEET, sheet(rows, ["original", "given", "completed"]))


def _drawn(decoder: Any, prefixes: Tensor, shape: Shape, hash_seed: int, sampling: Sampling) -> Iterator[Tensor]:
    """Yield the tokens (T,) of images that start with the rows of `prefixes` (B, n)."""
    device = next(decoder.parameters()).device
    for first in range(0, len(prefixes), AT_ONCE):
        prompts = prefixes[first : first + AT_ONCE]
        missing = shape.tokens - prefixes.shape[1]
        draws: dict[str, Any] = {"hash_seed": hash_seed, "sampling": sampling, "first_row": first, "vocabulary": 256}
        steps = continuations(decoder, prompts.to(device), missing, **draws)
        part = f"images {first + 1}-{first + len(prompts)} of {len(prefixes)}"
        progress = tqdm(steps, desc=part, total=missing, unit="sub-pixel", disable=None)
        columns = [torch.tensor(tokens) for tokens in progress]
        yield from torch.cat([prompts, torch.stack(columns, dim=1)], dim=1)
