"""Images drawn by a model of pixels: whole ones, and the lower halves of given ones.

B images drawn at once, n tokens given, T tokens of an image.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megasparse.config.schema import Config
from megasparse.errors import ConfigError
from megasparse.evaluation.generate import Sampling, continuations
from megasparse.evaluation.pictures import Picture, Shape, grid, image_shape, picture_of, read_picture, sheet, write_png

AT_ONCE = 16
"""Images drawn side by side: what each layer's cache holds, and what a step works on."""
SHEET = "sheet.png"


def shape_of(config: Config, option: str) -> Shape:
    """The shape of the images that a model draws. Raises ConfigError naming `option` for a model of anything else."""
    if config.data.tokenizer != "pixels" or config.model.kind != "decoder":
        found = f'a {config.model.kind} of data.tokenizer = "{config.data.tokenizer}"'
        raise ConfigError(option, f"this is {found}, which predicts no pixels", 'Give a decoder\'s of "pixels"')
    return image_shape(config.data.sequence_length)


def open_output(directory: str | None) -> Path:
    """The folder to write to, made if there is none. Raises ConfigError unless it is empty: nothing is overwritten."""
    if directory is None:
        raise ConfigError("--output", "it is missing", "Give a new folder, which the images are written to")
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        occupied = any(path.iterdir())
    except OSError as error:
        problem = f"{path} cannot be made or read ({error.strerror})"
        raise ConfigError("--output", problem, "Give a folder that can be written") from None
    if occupied:
        raise ConfigError("--output", f"{path} holds files already", "Give a new or an empty folder")
    return path


def draw_images(
    decoder: Any, shape: Shape, count: int, hash_seed: int, sampling: Sampling, directory: str | None
) -> None:
    """Write `count` images, each as soon as it is whole, and a sheet of all. Raises ConfigError for a used folder."""
    if count < 1:
        raise ConfigError("--images", f"{count} images cannot be drawn", "Ask for 1 or more")
    sampling.check()
    output = open_output(directory)
    nothing = torch.empty(count, 0, dtype=torch.long)
    pictures = []
    for number, tokens in enumerate(_drawn(decoder, nothing, shape, hash_seed, sampling)):
        pictures.append(picture_of(tokens, shape))
        write_png(output / f"{number:04}.png", pictures[-1])
    write_png(output / SHEET, sheet(grid(pictures)))


def complete_images(
    decoder: Any, shape: Shape, files: Sequence[str], hash_seed: int, sampling: Sampling, directory: str | None
) -> None:
    """Write each image with another lower half, named by its number and its file, and a sheet with a row for each:
    the original, the half that was given, the completion. Raises DataError for a file that is no image of this shape,
    before anything is made, and ConfigError unless the directory is new or empty.
    """
    sampling.check()
    originals = torch.stack([read_picture(file, shape) for file in files])
    given, output = originals[:, : shape.given], open_output(directory)
    rows: list[list[Picture]] = []
    for number, tokens in enumerate(_drawn(decoder, given, shape, hash_seed, sampling)):
        row = [picture_of(each, shape) for each in (originals[number], given[number], tokens)]
        write_png(output / f"{number:04}_{Path(files[number]).stem}.png", row[-1])
        rows.append(row)
    write_png(output / SHEET, sheet(rows, ["original", "given", "completed"]))


def _drawn(decoder: Any, given: Tensor, shape: Shape, hash_seed: int, sampling: Sampling) -> Iterator[Tensor]:
    """The tokens (T,) of each image whose first tokens are those of a row of `given` (B, n)."""
    device = next(decoder.parameters()).device
    for first in range(0, len(given), AT_ONCE):
        prompts = given[first : first + AT_ONCE]
        missing = shape.tokens - given.shape[1]
        steps = continuations(
            decoder,
            prompts.to(device),
            missing,
            hash_seed=hash_seed,
            sampling=sampling,
            first_row=first,
            vocabulary=256,
        )
        what = f"images {first + 1}-{first + len(prompts)} of {len(given)}"
        found = [
            torch.tensor(tokens) for tokens in tqdm(steps, desc=what, total=missing, unit="sub-pixel", disable=None)
        ]
        yield from torch.cat([prompts, torch.stack(found, dim=1)], dim=1)
