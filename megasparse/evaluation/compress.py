"""What gzip -9 and xz -9 make of the same held-out bytes: the yardstick beside a model's bits/dim."""

import lzma
import zlib
from collections.abc import Iterable, Iterator

from megasparse.evaluation.bits_per_dim import Stream

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


def _size(compressor: "zlib._Compress | lzma.LZMACompressor", pieces: Iterable[bytes]) -> int:
    return sum(len(compressor.compress(piece)) for piece in pieces) + len(compressor.flush())
