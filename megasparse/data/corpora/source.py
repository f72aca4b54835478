"""A corpus' source as one stream of bytes: files, folders, URLs, members of zip archives, decompressed on the fly."""

import argparse
import bz2
import difflib
import gzip
import hashlib
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from tqdm import tqdm

from megasparse.data.corpora.download import download, is_url
from megasparse.errors import ConfigError, DataError, did_you_mean

PIECE = 1 << 20
Opener = Callable[[IO[bytes]], IO[bytes]]
DECOMPRESS = cast(dict[str, Opener], {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open})
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError, RuntimeError)
"""What the standard library raises for a file that is missing, damaged, encrypted, or compressed in an unknown way."""


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a corpus that is read from a source and cut into samples."""
    parser.add_argument("--source", nargs="+", required=True, metavar="PATH_OR_URL", help="what to read, in this order")
    parser.add_argument("--member", metavar="NAME", help="which file of a zip archive, where it has several")
    parser.add_argument(
        "--sample-bytes", type=positive, default=65_536, help="bytes in a sample (default: %(default)s)"
    )


def positive(text: str) -> int:
    """An option's whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


@dataclass(frozen=True)
class Source:
    """The bytes of all files, one after another, and what identifies them. A corpus that is made up has no files."""

    locations: tuple[str, ...]
    """As the user named them."""
    member: str | None
    files: tuple[Path, ...]
    total_bytes: int
    sha256: str
    md5: str

    @classmethod
    def open(cls, locations: Sequence[str], member: str | None, downloads: Path) -> "Source":
        """Find (or download into `downloads`) every file, and read all of it once to know its size and digests.

        Raises DataError naming the file that cannot be read.
        """
        files = tuple(file for location in locations for file in _files(location, downloads))
        size, sha256, md5 = 0, hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        with tqdm(desc="reading the source", unit="B", unit_scale=True, disable=None) as bar:
            for piece in _pieces(files, member):
                size += len(piece)
                sha256.update(piece)
                md5.update(piece)
                bar.update(len(piece))
        return cls(tuple(locations), member, files, size, sha256.hexdigest(), md5.hexdigest())

    @property
    def name(self) -> str:
        return " ".join(self.locations)

    def pieces(self) -> Iterator[bytes]:
        """All bytes, a piece of up to 1 MiB at a time. Raises DataError when they are not those that `open` read."""
        digest = hashlib.sha256()
        for piece in _pieces(self.files, self.member):
            digest.update(piece)
            yield piece
        if digest.hexdigest() != self.sha256:
            raise DataError(self.name, "it changed while it was read", "Leave it alone and run the command again")


def _files(location: str, downloads: Path) -> list[Path]:
    """The files a location stands for, those of a folder sorted by path without hidden ones."""
    if is_url(location):
        return [download(location, downloads)]
    path = Path(location)
    if not path.exists():
        raise DataError(location, "there is no such file or folder", "Check --source")
    if path.is_file():
        return [path]
    if downloads.resolve().is_relative_to(path.resolve()):
        raise DataError(location, "the output is inside this folder", "Choose an --output outside of the source")
    inside = sorted(p for p in path.rglob("*") if p.is_file())
    files = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if not files:
        raise DataError(location, "there are no files in this folder", "Check --source")
    return files


def _pieces(files: Iterable[Path], member: str | None) -> Iterator[bytes]:
    for file in files:
        try:
            with ExitStack() as stack:
                stream = _open(file, member, stack)
                while piece := stream.read(PIECE):
                    yield piece
        except UNREADABLE as error:
            mend = "Check that it is complete and of the kind its name says"
            raise DataError(file, f"cannot be read: {str(error) or type(error).__name__}", mend) from None


def _open(file: Path, member: str | None, stack: ExitStack) -> IO[bytes]:
    """The decompressed stream of a file, or of a member of the zip archive that it is."""
    stream: IO[bytes]
    if zipfile.is_zipfile(file):
        archive = stack.enter_context(zipfile.ZipFile(file))
        name = _member(file, archive, member)
        stream = stack.enter_context(archive.open(name))
    elif member is not None:
        raise ConfigError("--member", f"{os.fspath(file)} is not a zip archive", "Leave --member out")
    else:
        name = file.name
        stream = stack.enter_context(file.open("rb"))
    decompress = DECOMPRESS.get(Path(name).suffix.lower())
    return stack.enter_context(decompress(stream)) if decompress else stream


def _member(file: Path, archive: zipfile.ZipFile, member: str | None) -> str:
    """`member`, or the archive's only one."""
    names = [info.filename for info in archive.infolist() if not info.is_dir()]
    if member is None and len(names) == 1:
        return names[0]
    if member is None:
        some = ", ".join(names[:5])
        raise DataError(file, f"this archive has {len(names)} files ({some}, …)", "Choose one with --member NAME")
    if member not in names:
        near = difflib.get_close_matches(member, names, n=5, cutoff=0.3)
        raise DataError(file, f'there is no "{member}" in this archive', did_you_mean(member, near or names[:5]))
    return member


class ByteStream:
    """`read(n)` over an iterable of pieces of any size."""

    def __init__(self, pieces: Iterable[bytes]):
        self._pieces = filter(None, pieces)
        self._rest = b""

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end."""
        parts, missing = [], size
        while missing:
            self._rest = self._rest or next(self._pieces, b"")
            if not self._rest:
                break
            parts.append(self._rest[:missing])
            self._rest = self._rest[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)


def cut(pieces: Iterable[bytes], sizes: Mapping[str, int]) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Cut a stream into (name, stream of `size` bytes), in turn; each is used up before the next is asked for."""
    stream = ByteStream(pieces)
    for name, size in sizes.items():
        yield name, _take(stream, size)
    while stream.read(PIECE):  # to its end, where a source that changed meanwhile is found out
        pass


def _take(stream: ByteStream, size: int) -> Iterator[bytes]:
    while size:
        piece = stream.read(min(size, PIECE))
        if not piece:
            return
        size -= len(piece)
        yield piece
