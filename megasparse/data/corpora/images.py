"""Images as tokens: 256 values, rows from top to bottom, pixels from left to right, red, green and blue of each.

A piece is the name of an image, a zero byte, and its encoded file; or, without a name, pixels with all red values
first, as archives of arrays store them.

Images in folders, tar and zip archives are recognised by their suffix. Nothing is extracted, and no archive is held in
memory. S side of an image.
"""

import io
import os
import re
import sys
import tarfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import islice, zip_longest
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from megasparse.data.corpora.corpus import (
    NAMES,
    SPLIT,
    UNCHANGED,
    Corpus,
    CorpusSettings,
    CorpusSplits,
    check_seed,
    option,
    require_full,
    split_option,
    split_sizes,
)
from megasparse.data.corpora.source import (
    PIECE,
    UNREADABLE,
    ZIP_HIDDEN,
    Part,
    Source,
    is_hidden,
    open_zip,
    reading,
    reason,
    refuse_bomb,
    report_left_out,
)
from megasparse.data.encoders import Encoded, PieceEncoder
from megasparse.data.order import permutation
from megasparse.data.tokenizers.simple import PixelTokenizer
from megasparse.errors import DataError, SourceError, positive
from megasparse.files import open_file

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM")
"""Formats that Pillow may read: none of them runs another program or reads another file."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm", ".pgm")
MODES = {"RGB": "RGB", "L": "grey", "P": "palette", "1": "black-and-white"}
"""Modes of Pillow whose colours are three numbers of a byte each."""
MOST_BYTES = 1 << 24  # of an encoded file: 64 × 64 pixels take 12,288 unencoded
MOST_HEADER = 1 << 22  # bytes of an extended header of a tar archive
DEEP = "more than 8 bits a colour"


ARCHIVE = re.compile(r"\.(zip|tar(\.(gz|xz|bz2))?|tgz|txz|tbz2?)\Z", re.IGNORECASE)
SPLIT_NAME = re.compile(r"\A(train|valid|val|test)(ing|ation)?([_.-]?[0-9][0-9x_.-]*)?\Z", re.IGNORECASE)


class PixelEncoder(PieceEncoder):
    """Encode pieces as S·S·3 tokens an image."""

    name = PixelTokenizer.name
    sha256 = PixelTokenizer.sha256

    def __init__(self, side: int):
        self.side, self.record = side, 3 * side**2

    def encode(self, piece: bytes) -> Encoded:
        name, _, content = piece.partition(b"\0")
        if name:
            tokens = np.frombuffer(decode(name.decode(), content, self.side), dtype=np.uint8)
        else:  # (images, 3, S, S) -> (images, S, S, 3)
            planes = np.frombuffer(content, dtype=np.uint8).reshape(-1, 3, self.side, self.side)
            tokens = planes.transpose(0, 2, 3, 1).reshape(-1)
        return Encoded(tokens, tokens.size, 0)


def file_piece(name: str, content: bytes) -> bytes:
    """Return the piece of an encoded image file."""
    return name.encode(errors="backslashreplace").replace(b"\0", b"?") + b"\0" + content


def planar_piece(planes: bytes) -> bytes:
    """Return the piece of images of uint8 (3, S, S) each, one after another."""
    return b"\0" + planes


def decode(name: str, content: bytes, side: int) -> bytes:
    """Return the pixels of an image file, S·S·3 bytes, converted to RGB and rotated by their EXIF orientation.

    The size is checked before decoding: no file can allocate more than S·S pixels. Raises DataError for another size,
    transparency, other colours, more than 8 bits, damage.
    """
    if len(content) > MOST_BYTES:
        raise DataError(name, f"{len(content):,} bytes are too many for an image of {side}×{side}", "Leave it out")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a bomb is recognised by its size, whatever Pillow warns of
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                _check(name, image, content, side)
                image.load()
                with suppress(Exception):  # damaged EXIF data
                    ImageOps.exif_transpose(image, in_place=True)
                return image.convert("RGB").tobytes()
    except DataError:
        raise
    except Exception as error:  # on a damaged file Pillow's readers raise whatever they stumble over
        problem = "no image of a known kind" if isinstance(error, Image.UnidentifiedImageError) else reason(error)
        raise DataError(name, f"cannot be decoded: {problem}", f"Repair it ({', '.join(FORMATS)} are read)") from None


def _check(name: str, image: Image.Image, content: bytes, side: int) -> None:
    if image.size != (side, side):
        width, height = image.size
        raise DataError(name, f"this image has {width}×{height} pixels, {side}×{side} are expected", "Scale or crop it")
    mode = f"mode {image.mode}"
    if image.format == "PNG" and content[24] > 8:  # IHDR's bit depth: Pillow would cut RGB to 8 bits
        mode = DEEP
    elif "transparency" in image.info:
        mode += " with transparency"
    elif getattr(image, "n_frames", 1) > 1:
        mode = "several frames"
    elif image.mode in MODES:
        return _report_conversion(image.mode)
    raise DataError(name, f"this image has {mode}, not just red, green and blue", "Convert it to RGB of 8 bits")


@cache
def _report_conversion(mode: str) -> None:
    if mode != "RGB":
        print(f"{MODES[mode]} images are converted to RGB: three tokens a pixel", file=sys.stderr)


class ImageFile(NamedTuple):
    name: str
    """The file's path; in an archive, `ARCHIVE:MEMBER`."""
    folders: tuple[str, ...]
    """Its folders in the archive, and what `folders` returns."""
    read: Callable[[], bytes]
    """Read the content; of an archive's member only before the next file is requested."""


def image_files(source: Source) -> Iterator[ImageFile]:
    """Yield every image of a source, in its order; an archive's in the order of the archive.

    Raises DataError naming a file that is empty or cannot be read, or a member that is neither a file nor a folder.
    """
    for name in source.empty:
        if name.lower().endswith(SUFFIXES) or ARCHIVE.search(name):
            raise DataError(name, "this file is empty", "Get it again, or leave it out")
    for part in source.parts:
        if part.name.lower().endswith(".zip"):
            yield from _zip_members(part, folders(source, part))
        elif ARCHIVE.search(part.name):
            yield from _members(part.path, folders(source, part))
        elif part.name.lower().endswith(SUFFIXES):
            yield ImageFile(str(part), folders(source, part), partial(part_content, part, MOST_BYTES))


def folders(source: Source, part: Part) -> tuple[str, ...]:
    """Return the folders of a file below its location, an archive's name without suffix, and the location's."""
    *below, name = part.name.split("/")
    if archive := ARCHIVE.search(name):
        below.append(name[: archive.start()])
    locations = [Path(location) for location in source.locations]
    return (*below, *(path.name for path in locations if path in part.path.parents))


def part_content(part: Part, most: int = 1 << 26) -> bytes:
    """Return the first bytes of a file, most of them or few more."""
    return b"".join(islice(part.pieces(), 1 + most // PIECE))


def _members(path: Path, around: tuple[str, ...]) -> Iterator[ImageFile]:
    for member, read in members(path, MOST_BYTES + 1):
        name = PurePosixPath(member.name)
        if member.isdir() or is_hidden(name.as_posix()):
            continue
        shown = f"{path}:{member.name}"
        if not member.isreg() or member.issparse():
            raise DataError(shown, f"at byte {member.offset} this is neither a file nor a folder", "Pack the files")
        if name.suffix.lower() in SUFFIXES:
            yield ImageFile(shown, (*name.parent.parts, *around), read)


def _zip_members(part: Part, around: tuple[str, ...]) -> Iterator[ImageFile]:
    with unpacking(part.path):
        infos = open_zip(part.path).infolist()
    for info in infos:
        name, member = PurePosixPath(info.filename), replace(part, member=info.filename, crc32=info.CRC)
        if name.suffix.lower() in SUFFIXES and not is_hidden(name.as_posix(), ZIP_HIDDEN):
            yield ImageFile(str(member), (*name.parent.parts, *around), partial(part_content, member, MOST_BYTES))


class TarHeader(tarfile.TarInfo):
    """A header whose extended headers (long names, PAX) are bounded: tarfile reads them whole."""

    EXTENDED = frozenset(b"LKxgX")

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        most = MOST_HEADER if self.type[0] in self.EXTENDED else sys.maxsize
        if not 0 <= self.size <= most:
            problem = f"the header of {self.name[:80]} states {self.size:,} bytes"
            raise tarfile.InvalidHeaderError(problem)  # type: ignore[attr-defined]
        return super()._proc_member(archive)  # type: ignore[misc]


def members(path: Path, most: int = 1 << 26) -> Iterator[tuple[tarfile.TarInfo, Callable[[], bytes]]]:
    """Yield every member of an archive, and a function that reads its first `most` bytes until the next is asked for.
    TarFile's own iterator takes a broken header for the end, and holds all that it has seen.
    """
    with ExitStack() as stack:
        with unpacking(path):
            file: Any = stack.enter_context(open_file(path))
            size, magic = os.fstat(file.fileno()).st_size, file.peek(2)[:2]
            mode: Any = {b"\x1f\x8b": "r:gz", b"BZ": "r:bz2", b"\xfd7": "r:xz"}.get(magic, "r:")
            tar = stack.enter_context(tarfile.open(fileobj=file, mode=mode, tarinfo=TarHeader))
        assert tar.fileobj is not None
        tar.offset = 0
        while True:
            with unpacking(path):
                tar.fileobj.seek(start := tar.offset)
                try:
                    member = TarHeader.fromtarfile(tar)
                except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
                    return
                except tarfile.HeaderError as error:  # type: ignore[attr-defined]
                    raise tarfile.ReadError(f"there is no valid header at byte {tar.offset} ({error})") from None
                if member.size < 0 or tar.offset <= start:  # PAX headers state sizes, too
                    raise tarfile.ReadError(f"the header at byte {start} states {member.size:,} bytes")
                refuse_bomb(path, tar.offset, size)

            def read(member: tarfile.TarInfo = member) -> bytes:
                with unpacking(path):
                    file = tar.extractfile(member)
                    assert file is not None  # it is a regular file
                    return file.read(most)

            yield member, read


unpacking = partial(
    reading,
    errors=(*UNREADABLE, ValueError, tarfile.TarError),
    problem="this archive cannot be read",
    hint="Get it again",
)


SHARED_OUT = {
    **Corpus.OPTIONS,
    **split_option(f"of the images for each split, at random (default: as folders name it, else {SPLIT})"),
    **option("--seed", type=int, default=0, help="of that permutation (default: %(default)s)"),
}


class Images(Corpus):
    """Images of your own, all of one size, in folders, tar and zip archives.

    The name of a folder or archive selects the split (train, validation or valid, test, also with numbers: valid_64x64,
    train-01.tar); otherwise a random permutation of --seed does.
    """

    EXAMPLE = "--source photos/ --size 64 --output data/photos"
    KIND = "raw"

    SIZE_HELP = "every image has S×S pixels (default: %(default)s)"
    OPTIONS = SHARED_OUT | option("--size", type=positive, default=64, metavar="S", help=SIZE_HELP)

    def encoder(self, settings: CorpusSettings) -> PixelEncoder:
        return PixelEncoder(settings["size"])

    def splits(self, source: Source, settings: CorpusSettings) -> CorpusSplits:
        return labelled(source, shared_out(source, settings) or splits_by_folder(source))


def splits_by_folder(source: Source) -> list[str]:
    """Return the split of each image of a source by its folders. Raises DataError if they name none."""
    labels = []
    for image in image_files(source):
        name = split_named(image.folders)
        if name is None:
            raise DataError(image.name, "no folder names the split of this image", "Move it below train, valid or test")
        labels.append(name)
    if not labels:
        kinds = ", ".join(SUFFIXES)
        raise DataError(source.name, "contains no images", f"Give folders or archives of files named {kinds}")
    return labels


def split_named(folders: Sequence[str]) -> str | None:
    for folder in folders:
        if match := SPLIT_NAME.match(folder):
            return "validation" if match[1].lower().startswith("val") else match[1].lower()
    return None


def shared_out(source: Source, settings: CorpusSettings) -> list[str]:
    """Return the split of each image by --split, or by the default percentages if no folder names a split; else []."""
    split, seed = settings["split"], settings["seed"]
    check_seed(seed)
    count = 0
    for image in image_files(source):
        if split is None and split_named(image.folders):
            return []
        count += 1
    sizes = split_sizes(split or SPLIT, count)
    if count:
        require_full(source, sizes, f"{count} images")
    labels = np.empty(count, dtype=object)
    labels[permutation(count, seed)] = np.repeat([*sizes], [*sizes.values()])
    return list(labels)


def hold_out(labels: Sequence[str], every: int) -> list[str]:
    """Return the splits, with every `every`-th image of train moved to an empty validation split."""
    if "validation" in labels:
        return list(labels)
    number = np.cumsum([name == "train" for name in labels])
    return [
        "validation" if name == "train" and n % every == 0 else name for name, n in zip(labels, number, strict=True)
    ]


def labelled(source: Source, labels: Sequence[str]) -> CorpusSplits:
    """Return the splits of a source's images by the label of each."""
    names = [part.name for part in source.parts]
    others = [name for name in names if not (name.lower().endswith(SUFFIXES) or ARCHIVE.search(name))]
    report_left_out(source.name, len(labels), others, "their names end otherwise than those of images and archives")

    def pieces(name: str) -> Iterator[bytes]:
        for label, image in zip_longest(labels, image_files(source)):
            if label is None or image is None:
                raise SourceError(source.name, "it changed while it was read", UNCHANGED)
            if label == name:
                yield file_piece(image.name, image.read())

    return ((name, [pieces(name)]) for name in NAMES if name in labels)
