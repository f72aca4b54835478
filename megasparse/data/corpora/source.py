"""A corpus' source: files, folders, URLs, members of zip archives, decompressed on the fly."""

import bz2
import codecs
import difflib
import fnmatch
import gzip
import hashlib
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal, cast

from tqdm import tqdm

from megasparse.data.corpora.download import download_all
from megasparse.data.urls import is_url
from megasparse.errors import ConfigError, DataError, SourceError, did_you_mean, one_line, report_line
from megasparse.files import open_file

PIECE = 1 << 20
BOMB_BYTES, BOMB_RATIO = 1 << 26, 200
"""Largest unpacked bytes, and ratio to the packed ones, of a file: text packs 3 to 20 times."""
ZIP_HIDDEN = (".", "__MACOSX")
Document = Iterable[bytes]
Kind = Literal["stream", "files", "raw"]


def arrow() -> Any:
    """Return the module pyarrow. Raises DataError if it is not installed."""
    with DataError.instead_of(ImportError, "pyarrow", "it is not installed", "Run: pip install -e '.[arrow]'"):
        import pyarrow
    return pyarrow


def open_zstd(stream: IO[bytes]) -> Any:
    """Return the decompressed content of a stream of Zstandard frames."""
    pyarrow = arrow()
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), "zstd")


Opener = Callable[[IO[bytes]], IO[bytes]]
DECOMPRESS = cast(dict[str, Opener], {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": open_zstd})
UNREADABLE = (
    *(OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError, RuntimeError),
    UnicodeDecodeError,
)
"""Exceptions for a file that is missing, damaged, encrypted, or compressed in an unknown way."""
CONVERT = "If it is Latin-1, convert it: iconv -f latin1 -t utf-8"
EXTRACT = "Extract its text first"
DOCUMENTS = (".docx", ".xlsx", ".pptx", ".odt", ".ods", ".epub")
"""Suffixes of documents that are zip archives."""
SIGNATURES = {
    "a gzip file": (0, b"\x1f\x8b"), "a bzip2 file": (4, b"1AY&SY"), "an xz file": (0, b"\xfd7zXZ\0"),
    "a Zstandard file": (0, b"\x28\xb5\x2f\xfd"), "a zip archive": (0, b"PK\3\4"), "a tar archive": (257, b"ustar"),
    "a 7z archive": (0, b"7z\xbc\xaf\x27\x1c"), "a RAR archive": (0, b"Rar!\x1a\x07"), "a PDF file": (0, b"%PDF-"),
    "a Parquet file": (0, b"PAR1"), "an Arrow file": (0, b"ARROW1"),
    "text in UTF-32": (0, b"\xff\xfe\0\0"), "text in UTF-16": (0, b"\xff\xfe"),
    "text in UTF-16, big endian": (0, b"\xfe\xff"),
}  # fmt: skip
"""Offset and bytes of the signatures of files that are not plain text."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a source, or one member of a zip archive, as `Source.open` found it."""

    path: Path
    """The file, or the archive."""
    member: str | None
    name: str
    """Path below its location, `train/1.txt`; for a file that is the location, its name."""
    raw: bool
    """Neither decompressed nor opened as an archive."""
    size: int = 0
    """Bytes of its content; of a file that `Source.open` has not read, 0."""
    crc32: int = 0
    not_utf8: int | None = None
    """Offset of the first byte that is not UTF-8; None if all are, or if `raw`."""
    zero: int | None = None
    """Offset of the first byte 0; None without such a byte, or if `raw`."""

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}: {self.member}"

    def pieces(self) -> Iterator[bytes]:
        """Yield the content, up to 1 MiB at a time. Raises DataError if it changed since `Source.open`."""
        crc32 = 0
        for piece in read(self):
            crc32 = zlib.crc32(piece, crc32)
            yield piece
        if crc32 != self.crc32:
            raise SourceError(self, "it changed while it was read", "Leave it alone and run the command again")


@dataclass(frozen=True)
class Source:
    """The files of a corpus, none of a synthetic one, and their digests."""

    locations: tuple[str, ...]
    """Paths and URLs as the user named them."""
    member: str | None
    parts: tuple[Part, ...]
    """Files and members that are not empty; the files of a folder in the order of their paths."""
    total_bytes: int
    sha256: str
    """Digest of all content, one file after another."""
    md5: str = ""
    empty: tuple[str, ...] = ()
    """Names of empty files, which are left out."""
    layout: str | None = None
    """The sha256 over names and sizes of the parts; None if the files are one stream."""

    @classmethod
    def open(
        cls,
        locations: Sequence[str],
        member: str | None,
        downloads: Path,
        kind: Kind = "stream",
        parts: Sequence[Part] | None = None,
    ) -> "Source":
        """Find (or download into `downloads`) every file, and read it once for its size and digests.

        kind: "stream", one stream of bytes (an archive of several files requires `member`); "files", separate files and
        members of archives; "raw", files without decompression. parts: use these of `find_parts`. Raises DataError for
        an unreadable file and an empty source.
        """
        sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        with tqdm(desc="reading the source", unit="B", unit_scale=True, disable=None) as bar:

            def see(piece: bytes) -> None:
                sha256.update(piece)
                md5.update(piece)
                bar.update(len(piece))

            parts = [_examine(part, see) for part in parts or find_parts(locations, member, downloads, kind)]
        full = tuple(part for part in parts if part.size)
        empty = tuple(str(part) for part in parts if not part.size)
        if full:
            report_left_out(" ".join(locations), len(full), empty, "they are empty")
        elif locations:
            raise DataError(" ".join(locations), "there is nothing in it", "Check --source")
        layout = "".join(f"{part.name}\0{part.size}\n" for part in full).encode(errors="surrogateescape")
        return cls(
            locations=tuple(locations),
            member=member,
            parts=full,
            empty=empty,
            total_bytes=sum(part.size for part in full),
            sha256=sha256.hexdigest(),
            md5=md5.hexdigest(),
            layout=None if kind == "stream" else hashlib.sha256(layout).hexdigest(),
        )

    @property
    def name(self) -> str:
        return " ".join(self.locations)

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes, up to 1 MiB at a time. Raises DataError if they changed since `open`."""
        return chain.from_iterable(part.pieces() for part in self.parts)

    def require_text(self, zeros: bool = True) -> None:
        """Raise DataError unless all is UTF-8, without byte 0 if not `zeros`."""
        for part in self.parts:
            if part.not_utf8 is not None:
                raise DataError(part, f"byte {part.not_utf8:,} is not UTF-8", f"{CONVERT}; or use the corpus `text`")
            if part.zero is not None and not zeros:
                raise DataError(part, f"byte {part.zero:,} is 0, which stands between documents", "Remove it")


def find_parts(
    locations: Sequence[str], member: str | None, downloads: Path, kind: Kind, suffixes: Sequence[str] = ()
) -> list[Part]:
    """Return every file of a source, unread; a URL is downloaded into `downloads`.

    kind: as in `Source.open`. suffixes: restrict the files of folders to these.
    """
    return [
        part
        for location in locations
        for file, name in _files(location, downloads, tuple(suffixes))
        for part in _parts(file, name, member, kind)
    ]


def _files(location: str, downloads: Path, suffixes: tuple[str, ...]) -> list[tuple[Path, str]]:
    """Return (path, name below the location) of a location's files, sorted, without hidden ones."""
    if is_url(location):
        return download_all(location, downloads, suffixes)
    path = Path(location)
    if not path.exists():
        raise DataError(location, "there is no such file or folder", "Check --source")
    if path.is_file():
        return [(path, path.name)]
    if downloads.resolve().is_relative_to(path.resolve()):
        raise DataError(location, "the output is inside this folder", "Choose an --output outside of the source")
    inside = sorted(p for p in path.rglob("*") if p.is_symlink() or not p.is_dir())
    files = [p for p in inside if p.is_file() and not is_hidden(p.relative_to(path).as_posix())]
    named = [p for p in files if p.name.lower().endswith(suffixes)] if suffixes else files
    if not named:
        files_named = f"files named *{', *'.join(suffixes)}" if files else "files"
        raise DataError(location, f"there are no {files_named} in this folder", "Check --source")
    reason = f"they are hidden, no files{', or of other suffixes' if suffixes else ''}"
    report_left_out(location, len(named), [str(p.relative_to(path)) for p in inside if p not in {*named}], reason)
    return [(p, p.relative_to(path).as_posix()) for p in named]


def is_hidden(name: str, marks: str | tuple[str, ...] = ".") -> bool:
    """True if a file, or a folder in its path with slashes, starts with one of the marks."""
    return any(part.startswith(marks) for part in name.split("/"))


def report_left_out(location: object, count: int, left_out: Sequence[str], reason: str) -> None:
    """Print the number of files that are read, and the files left out, if any."""
    if left_out:
        some = ", ".join(map(one_line, left_out[:3])) + (", …" if len(left_out) > 3 else "")
        report_line(location, f"{count:,} files are read, {len(left_out):,} left out ({some}): {reason}")


def _parts(file: Path, name: str, member: str | None, kind: Kind) -> Iterator[Part]:
    """Yield the file, or the members of a zip archive."""
    if kind == "raw" or not _is_archive(file):
        if member is not None:
            raise ConfigError("--member", f"{file} is not a zip archive", "Leave --member out")
        yield Part(file, None, name, kind == "raw")
        return
    if file.suffix.lower() in DOCUMENTS:
        raise DataError(file, f"this is a {file.suffix.lower()} document, not plain text", EXTRACT)
    with reading(file):
        infos = [info for info in open_zip(file).infolist() if not info.is_dir()]
    members = sorted(info.filename for info in infos)
    refuse_bomb(file, sum(info.file_size for info in infos), file.stat().st_size)
    if kind == "stream" or member is not None:
        members = _members(file, members, member)
    hidden = [] if member is not None else [name for name in members if is_hidden(name, ZIP_HIDDEN)]
    chosen = [name for name in members if member is not None or not is_hidden(name, ZIP_HIDDEN)]
    report_left_out(file, len(chosen), hidden, "they are hidden")
    sizes = {info.filename: info.file_size for info in infos}
    yield from (Part(file, name, name, False, sizes[name]) for name in chosen)


def _is_archive(file: Path) -> bool:
    """Raise DataError for a zip archive without its end, which would be read as text."""
    with reading(file):
        if zipfile.is_zipfile(file):
            return True
        with open_file(file) as stream:
            if stream.read(4) == b"PK\3\4" or file.suffix.lower() == ".zip":
                raise DataError(file, "this zip archive is damaged: its end is missing", "Get it again")
    return False


def open_zip(file: Path) -> zipfile.ZipFile:
    """Return a zip archive, which stays open."""
    status = file.stat()
    return _opened(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1)
def _opened(file: Path, size: int, modified: int) -> zipfile.ZipFile:
    """Keep it open: reading the directory again for each member would take quadratic time."""
    return zipfile.ZipFile(open_file(file))


def _examine(part: Part, see: Callable[[bytes], None]) -> Part:
    """Return the part with size, checksum and offsets of its content. see: called with each piece."""
    size, crc32, not_utf8, zero = 0, 0, None, None
    decoder = codecs.getincrementaldecoder("utf-8")()
    for piece in chain(read(part), [b""]):
        see(piece)
        if not_utf8 is None and not part.raw:
            try:
                decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                not_utf8 = size + len(piece) - len(error.object) + error.start
        if zero is None and not part.raw and (offset := piece.find(0)) >= 0:
            zero = size + offset
        size, crc32 = size + len(piece), zlib.crc32(piece, crc32)
    return replace(part, size=size, crc32=crc32, not_utf8=not_utf8, zero=zero)


def read(part: Part) -> Iterator[bytes]:
    """Yield the content of a part, up to 1 MiB at a time; unless raw, decompressed and without a byte-order mark.

    Raises DataError if it cannot be read, or starts with the signature of another format.
    """
    with reading(part):
        compressed, size = part.path.stat().st_size, 0
        decompress = None if part.raw else DECOMPRESS.get(Path(part.member or part.path.name).suffix.lower())
        with ExitStack() as stack:
            opened = open_file(part.path) if part.member is None else open_zip(part.path).open(part.member)
            stream: IO[bytes] = stack.enter_context(opened)
            stream = stack.enter_context(decompress(stream)) if decompress else stream
            while piece := stream.read(PIECE):
                if not size and not part.raw:
                    _require_text(part, piece)
                size += len(piece)
                refuse_bomb(part, size, compressed)
                yield piece.removeprefix(codecs.BOM_UTF8) if size == len(piece) and not part.raw else piece


def _require_text(part: Part, start: bytes) -> None:
    for kind, (offset, signature) in SIGNATURES.items():
        if start.startswith(signature, offset):
            hint = "Unpack it: .gz, .bz2, .xz, .zst and .zip are read as they are if their names end so"
            if signature in (b"PAR1", b"ARROW1"):
                hint = "Write its rows to .jsonl, or read its texts by prepare-data parquet or huggingface"
            if "UTF" in kind:
                hint = f"Convert it: iconv -f {kind[8:14].lower()} -t utf-8"  # of "text in UTF-16"
            raise DataError(part, f"this is {kind}, not plain text", EXTRACT if "PDF" in kind else hint)
    even, odd = (start[first:512:2].count(0) for first in (0, 1))
    if len(start) > 16 and not min(even, odd) and 2 * max(even, odd) > len(start[1:512:2]):
        problem = "every second byte is 0, as in UTF-16"
        raise DataError(part, problem, f"Convert it: iconv -f utf-16{'le' if odd else 'be'} -t utf-8")


def refuse_bomb(what: Part | Path | str, size: int, compressed: int) -> None:
    """Raise DataError if a file of `compressed` bytes unfolds to too many bytes: `size` or more."""
    if size > max(BOMB_BYTES, BOMB_RATIO * compressed):
        problem = f"its {compressed:,} bytes unfold to {BOMB_RATIO} times as many and more, too many for a corpus"
        raise DataError(what, problem, "If you trust it, unpack it yourself, Parquet and Arrow files to .jsonl")


@contextmanager
def reading(
    what: Part | Path,
    errors: tuple[type[Exception], ...] = UNREADABLE,
    problem: str = "cannot be read",
    hint: str = "Check that it is complete and of the kind its name says",
) -> Iterator[None]:
    """Convert exceptions for a damaged file to DataError."""
    try:
        yield
    except errors as error:
        if "too much memory" in str(error):
            hint = "Its window is over 128 MiB: unpack it with zstd -d --long=31"
        raise DataError(what, f"{problem}: {reason(error)}", hint) from None


def reason(error: Exception) -> str:
    """Return the message of a library's exception, shortened, on one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _members(file: Path, names: list[str], member: str | None) -> list[str]:
    """Return the member of that name, all that match the pattern, or without a name the only one."""
    if member is None and len(names) == 1:
        return names
    if member is None:
        some = ", ".join(names[:5])
        raise DataError(file, f"this archive has {len(names)} files ({some}, …)", "Choose one with --member NAME")
    chosen = [member] if member in names else fnmatch.filter(names, member)
    if not chosen:
        near = difflib.get_close_matches(member, names, n=5, cutoff=0.3)
        raise DataError(file, f'there is no "{member}" in this archive', did_you_mean(member, near or names[:5]))
    return chosen
