"""Sizes that gzip -9, xz -9 and, of images, PNG reach on the same held-out bytes, to compare with bits/dim."""

import io
import lzma
import zlib
from collections.abc import Iterable, Iterator

import numpy as np
from PIL import Image

from megasparse.errors import ConfigError
from megasparse.evaluation.bits_per_dim import Stream
from megasparse.evaluation.pictures import image_shape, picture_of

PIECE = 1 << 20
GZIP_CONTAINER = 16 + zlib.MAX_WBITS  # zlib's way of asking for gzip's header and trailer


def gzip_size(pieces: Iterable[bytes]) -> int:
    """Bytes that gzip -9 -n needs for the concatenated pieces, to within 0.01 %: zlib's search is not GNU gzip's to the
    last match, and with the same buffers (memLevel 9) as near as it gets."""
    return _size(zlib.compressobj(9, zlib.DEFLATED, GZIP_CONTAINER, zlib.DEF_MEM_LEVEL + 1), pieces)


def xz_size(pieces: Iterable[bytes]) -> int:
    """Bytes that xz -9 needs for the concatenated pieces; takes about 700 MB of memory."""
    return _size(lzma.LZMACompressor(lzma.FORMAT_XZ, lzma.CHECK_CRC64, preset=9), pieces)


def bits_per_byte(stream: Stream, limit: int | None = None) -> dict[str, float]:
    """{"gzip", "xz"}: bits per byte of a split of byte tokens, or of its first `limit` bytes."""
    total = stream.tokens if limit is None else min(limit, stream.tokens)

    def pieces() -> Iterator[bytes]:
        for start in range(0, total, PIECE):
            yield bytes(stream.read(start, min(start + PIECE, total)).tolist())

    return {"gzip": 8 * gzip_size(pieces()) / total, "xz": 8 * xz_size(pieces()) / total}


def png_bits_per_dim(stream: Stream, length: int, limit: int | None = None) -> float:
    """Bits per sub-pixel of the images of `length` tokens each that a split consists of, or of its first `limit`.

    Each is a PNG file of its own as an optimiser leaves it: deflate at level 9, the filters chosen row by row, and
    nothing but the pixels in it. Raises ConfigError for a length that is no square image's, and where the split does
    not consist of whole images.
    """
    shape = image_shape(length)
    if stream.tokens == 0 or stream.tokens % length:
        problem = f"{length} tokens, but the split's {stream.tokens:,} are no whole number of such images"
        raise ConfigError("data.sequence_length", problem, "Set it to the tokens of an image")
    count = stream.tokens // length if limit is None else min(limit, stream.tokens // length)
    size = 0
    for first in range(0, count * length, length):
        picture = picture_of(stream.read(first, first + length), shape)
        size += png_size(np.ascontiguousarray(picture if shape.channels == 3 else picture[:, :, 0]))
    return 8 * size / (count * length)


def png_size(picture: np.ndarray) -> int:
    """Bytes of the smallest PNG file that Pillow writes of an image, uint8 (s, s, 3) or (s, s)."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG", optimize=True, compress_level=9)
    return file.tell()


def _size(compressor: "zlib._Compress | lzma.LZMACompressor", pieces: Iterable[bytes]) -> int:
    return sum(len(compressor.compress(piece)) for piece in pieces) + len(compressor.flush())
