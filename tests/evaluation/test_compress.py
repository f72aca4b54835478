"""The compressors' figures against the command-line tools."""

import io
import random
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megasparse.errors import ConfigError
from megasparse.evaluation.compress import bits_per_byte, gzip_size, png_bits_per_dim, png_size, xz_size
from tests.helpers.scoring import Stream

TEXT = b"".join(sorted(path.read_bytes() for path in Path(torch.__file__).parent.glob("nn/**/*.py")))[:1_500_000]


def by_tool(*command: str) -> int:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return len(subprocess.run(command, input=TEXT, capture_output=True, check=True).stdout)


def pieces(size: int) -> list[bytes]:
    return [TEXT[i : i + size] for i in range(0, len(TEXT), size)]


@pytest.mark.skipif("ng" in zlib.ZLIB_RUNTIME_VERSION, reason="zlib-ng searches for matches in its own way")
def test_gzip_is_the_tool_to_a_ten_thousandth():
    assert gzip_size(pieces(777_777)) == pytest.approx(by_tool("gzip", "-9", "-n", "-c"), rel=1e-4)


def test_xz_is_the_tool():
    assert xz_size(pieces(777_777)) == pytest.approx(by_tool("xz", "-9", "-T1", "-c"), abs=16)


def test_xz_sees_far_back():
    """What repeats after 9 MB is found again with the 64 MiB dictionary of -9, and not with the 8 MiB of -6."""
    block = random.Random(0).randbytes(50_000)
    assert xz_size([block, bytes(9_000_000), block]) < 60_000


def test_bits_per_byte_of_a_split_and_of_its_beginning():
    stream = Stream(np.frombuffer(TEXT[:300_000], dtype=np.uint8).copy())
    found = bits_per_byte(stream)
    assert found == {"gzip": 8 * gzip_size([TEXT[:300_000]]) / 300_000, "xz": 8 * xz_size([TEXT[:300_000]]) / 300_000}
    assert bits_per_byte(stream, limit=1000)["gzip"] == 8 * gzip_size([TEXT[:1000]]) / 1000


def png_of_one_filter(pixels: np.ndarray) -> int:
    """Bytes of a PNG file whose rows all have filter 2 (each byte less the one above), zlib at level 9: a header of 8
    bytes and three chunks, of 12 bytes each beside their content."""
    rows = pixels.reshape(len(pixels), -1)
    above = np.vstack([np.zeros_like(rows[:1]), rows[:-1]])
    filtered = np.hstack([np.full((len(rows), 1), 2, dtype=np.uint8), rows - above])
    return 8 + 3 * 12 + 13 + len(zlib.compress(filtered.tobytes(), 9))


@pytest.mark.parametrize("channels", [3, 1])
def test_png_size_is_that_of_the_format(channels):
    """Images for which subtracting the row above leaves hardly anything: Pillow's choice of filters finds it too."""
    noise = np.random.default_rng(0).integers(0, 256, (1, 64, channels), dtype=np.uint8)
    smooth = (noise + np.arange(64, dtype=np.uint8)[:, None, None]).squeeze()
    found = png_bits_per_dim(Stream(smooth[None]), 64 * 64 * channels)
    assert found * 64 * 64 * channels / 8 == pytest.approx(png_of_one_filter(smooth), rel=0.1)


def test_png_bits_are_those_of_all_images_or_of_the_first():
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    images[0] = 7
    flat, noisy = (8 * png_size(images[i]) / 192 for i in (0, 1))
    assert flat < 3.5 and noisy > 8  # noise cannot be made smaller, and 8×8 pixels do not pay for the chunks
    assert png_bits_per_dim(Stream(images), 192, limit=1) == flat
    assert png_bits_per_dim(Stream(images), 192, limit=9) == png_bits_per_dim(Stream(images), 192)
    sizes = [len_of_file(image) for image in images]
    assert png_bits_per_dim(Stream(images), 192) == 8 * sum(sizes) / images.size


def len_of_file(image: np.ndarray) -> int:
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="png", optimize=True)
    Image.open(io.BytesIO(file.getvalue())).verify()
    return len(file.getvalue())


@pytest.mark.parametrize(("count", "length", "problem"), [(192, 100, "are no whole"), (192, 96, "no square image")])
def test_png_wants_whole_square_images(count, length, problem):
    with pytest.raises(ConfigError, match=f"data.sequence_length: .*{problem}"):
        png_bits_per_dim(Stream(np.zeros(count, dtype=np.uint8)), length)
