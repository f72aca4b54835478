"""Images made for tests, and files of them written without Pillow for comparison with Pillow."""

import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megasparse.data.corpora import CORPORA
from tests.data.folders import source_of

RGB, GREY, PALETTE = 2, 0, 3
"""PNG's colour types."""


def draw(count: int, side: int = 8, seed: int = 0) -> np.ndarray:
    """(count, side, side, 3) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(rows: np.ndarray, colour: int = RGB, depth: int = 8, more: bytes = b"", size: Sequence[int] = ()) -> bytes:
    """A PNG file without filters. size: width and height in its header if they are to be wrong."""
    height, width = rows.shape[:2]
    header = struct.pack(">IIBBBBB", *(size or (width, height)), depth, colour, 0, 0, 0)
    content = b"".join(b"\0" + row.tobytes() for row in rows)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + more
        + chunk(b"IDAT", zlib.compress(content))
        + chunk(b"IEND", b"")
    )


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def write_tar(path: Path, files: Mapping[str, bytes | tarfile.TarInfo], mode: str = "w") -> Path:
    """A tar archive in the order given; a TarInfo is a member without content."""
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            member = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return path


def write_zip(path: Path, files: Mapping[str, bytes | str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def special_member(name: str, kind: bytes) -> tarfile.TarInfo:
    """A member of an archive that is not a file: a link to /etc/passwd, or the given kind."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


def read_corpus(corpus: str, *locations: Path, **options: Any) -> dict[str, np.ndarray]:
    """The images of each split, as the encoder makes them: (images, side, side, 3)."""
    settings = {"split": None, "seed": 0, "downsampling": None, "size": 8, **options}
    source = source_of(*locations, kind="raw")
    CORPORA[corpus].about(source, settings)
    encoder: Any = CORPORA[corpus].encoder(settings)
    side = encoder.side
    return {
        name: np.concatenate(
            [encoder.encode(piece).tokens for document in documents for piece in document] or [np.empty(0, np.uint8)]
        ).reshape(-1, side, side, 3)
        for name, documents in CORPORA[corpus].splits(source, settings)
    }
