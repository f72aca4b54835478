"""The image files of folders and tar archives, one at a time. Nothing is extracted, no archive is held in memory.

Image files are recognised by the suffix of their name; others are left out, as are hidden files. Names in archives only
give the split and stand in messages: they are never used as paths.
"""

import os
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megasparse.data.corpora.number_files import reading
from megasparse.data.corpora.pixels import MOST_BYTES, SUFFIXES
from megasparse.data.corpora.source import PIECE, Part, Source
from megasparse.errors import DataError

ARCHIVE = re.compile(r"\.(tar(\.(gz|xz|bz2))?|tgz|txz|tbz2?)\Z", re.IGNORECASE)


class ImageFile(NamedTuple):
    name: str
    """The file's path; in an archive, the archive's path, a colon and the member's name."""
    folders: tuple[str, ...]
    """The folders that it lies in: those in the archive, then what `folders` returns for the file or archive."""
    read: Callable[[], bytes]
    """The file's content; of an archive's member only until the next file is asked for."""


def image_files(source: Source) -> Iterator[ImageFile]:
    """Every image of a source, in its order; an archive's in the order of the archive.

    Raises DataError naming the file that is empty or cannot be read, and the member of an archive that is neither a
    file nor a folder.
    """
    for name in source.empty:
        if name.lower().endswith(SUFFIXES) or ARCHIVE.search(name):
            raise DataError(name, "this file is empty", "Get it again, or leave it out")
    for part in source.parts:
        if ARCHIVE.search(part.name):
            yield from _members(part.path, folders(source, part))
        elif part.name.lower().endswith(SUFFIXES):
            yield ImageFile(str(part), folders(source, part), partial(part_content, part, MOST_BYTES))


def folders(source: Source, part: Part) -> tuple[str, ...]:
    """The folders that a file lies in below its location, an archive's name without suffix, and the location's."""
    *below, name = part.name.split("/")
    if archive := ARCHIVE.search(name):
        below.append(name[: archive.start()])
    locations = [Path(location) for location in source.locations]
    return (*below, *(path.name for path in locations if path in part.path.parents))


def part_content(part: Part, most: int = 1 << 26) -> bytes:
    """The first bytes of a file, most of them or few more."""
    return b"".join(islice(part.pieces(), 1 + most // PIECE))


def _members(path: Path, around: tuple[str, ...]) -> Iterator[ImageFile]:
    for member, read in members(path, MOST_BYTES + 1):
        name = PurePosixPath(member.name)
        if member.isdir() or any(part.startswith(".") for part in name.parts):
            continue
        shown = f"{os.fspath(path)}:{member.name}"
        if not member.isreg() or member.issparse():
            problem = f"at byte {member.offset} this is neither a file nor a folder (a link, or a device)"
            raise DataError(ascii(shown)[1:-1], problem, "Pack the files themselves")
        if name.suffix.lower() in SUFFIXES:
            yield ImageFile(shown, (*name.parent.parts, *around), read)


def members(path: Path, most: int = 1 << 26) -> Iterator[tuple[tarfile.TarInfo, Callable[[], bytes]]]:
    """Every member of an archive, and what reads its first `most` bytes until the next is asked for, where it is a
    regular file. TarFile's own iterator takes a broken header for the end, and holds all that it has seen.
    """
    with ExitStack() as stack:
        with reading(path):
            tar = stack.enter_context(tarfile.open(path))
        assert tar.fileobj is not None
        tar.offset = 0
        while True:
            with reading(path):
                tar.fileobj.seek(tar.offset)
                try:
                    member = tarfile.TarInfo.fromtarfile(tar)
                except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
                    return
                except tarfile.HeaderError as error:  # type: ignore[attr-defined]
                    raise tarfile.ReadError(f"there is no valid header at byte {tar.offset} ({error})") from None
            yield member, partial(_content, path, tar, member, most)


def _content(path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, most: int) -> bytes:
    with reading(path):
        file = tar.extractfile(member)
        assert file is not None  # it is a regular file
        return file.read(most)
