"""Images as tokens: 256 values, rows from top to bottom, pixels from left to right, red, green and blue of each.

What an image corpus hands on is a piece an image: the name it is known by, a zero byte, and the encoded file as it
is; or, without a name, pixels as the archives of numbers have them, all red ones first.

S side of an image.
"""

import io
import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from PIL import Image

from megasparse.data.corpora.source import reason
from megasparse.data.encoding import Encoded
from megasparse.data.tokenizers.byte import PixelTokenizer
from megasparse.errors import DataError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM")
"""Formats that Pillow may read: none of them runs another program or reads another file."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm", ".pgm")
CONVERTED = ("RGB", "L", "P", "1")
"""Modes whose colours are three numbers of a byte each: RGB, grey, palette, black and white."""
MOST_BYTES = 1 << 24  # of an encoded file: 64 × 64 pixels take 12,288 unencoded
DEEP = "more than 8 bits a colour"


@dataclass(frozen=True)
class PixelEncoder:
    """Pieces, as the file's head describes them, to S·S·3 tokens an image."""

    side: int
    name = PixelTokenizer.name
    sha256 = PixelTokenizer.sha256
    width: ClassVar[Literal[1]] = 1
    end = None
    file = None

    @property
    def record(self) -> int:
        return 3 * self.side**2

    def encode(self, piece: bytes) -> Encoded:
        """Raises DataError naming an image that is damaged, of another size, or has not just three colours."""
        name, _, content = piece.partition(b"\0")
        pixels = decode(name.decode(), content, self.side) if name else interleave(content, self.side)
        tokens = np.frombuffer(pixels, dtype=np.uint8)
        return Encoded(tokens, tokens.size, 0)


def file_piece(name: str, content: bytes) -> bytes:
    """The piece of an encoded image file."""
    return name.encode(errors="backslashreplace").replace(b"\0", b"?") + b"\0" + content


def planar_piece(planes: bytes) -> bytes:
    """The piece of images of uint8 (3, S, S) each, one after another."""
    return b"\0" + planes


def interleave(planes: bytes, side: int) -> bytes:
    """(images, 3, S, S) -> (images, S, S, 3)."""
    return np.frombuffer(planes, dtype=np.uint8).reshape(-1, 3, side, side).transpose(0, 2, 3, 1).tobytes()


def decode(name: str, content: bytes, side: int) -> bytes:
    """The pixels of an image file: S·S·3 bytes. Grey, black-and-white and palette images become RGB.

    The size is looked at before anything is decoded, so that no file can ask for more than S·S pixels. Raises
    DataError naming the file: for another size, transparency, other colours, more than 8 bits, damage.
    """
    shown = ascii(name)[1:-1]
    if len(content) > MOST_BYTES:
        raise DataError(shown, f"{len(content):,} bytes are too many for an image of {side}×{side}", "Leave it out")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a bomb is recognised by its size, whatever Pillow warns of
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                _check(shown, image, content, side)
                image.load()
                return image.convert("RGB").tobytes()
    except DataError:
        raise
    except Exception as error:  # on a damaged file Pillow's readers raise whatever they stumble over
        unknown = isinstance(error, Image.UnidentifiedImageError)
        problem = "no image of a known kind" if unknown else reason(error)
        hint = f"Repair it or leave it out ({', '.join(FORMATS)} are read)"
        raise DataError(shown, f"cannot be decoded: {problem}", hint) from None


def _check(shown: str, image: Image.Image, content: bytes, side: int) -> None:
    if image.size != (side, side):
        width, height = image.size
        hint = "Scale or crop it to that"
        raise DataError(shown, f"this image has {width}×{height} pixels, {side}×{side} are expected", hint)
    mode = f"mode {image.mode}"
    if image.format == "PNG" and content[24] > 8:  # IHDR's bit depth: Pillow would cut RGB to 8 bits
        mode = DEEP
    elif "transparency" in image.info:
        mode += " with transparency"
    elif getattr(image, "n_frames", 1) > 1:
        mode = "several frames"
    elif image.mode in CONVERTED:
        return
    raise DataError(shown, f"this image has {mode}, not just red, green and blue", "Convert it to RGB of 8 bits")
