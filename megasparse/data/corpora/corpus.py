"""The base class of corpora: options, splits by percent, pieces of text."""

import argparse
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from tqdm import tqdm

from megasparse.data.corpora.source import PIECE, Document, Kind, Source
from megasparse.data.encoders import PieceEncoder, TextEncoder
from megasparse.data.tokenizers.sentence_piece import segments
from megasparse.errors import ConfigError, DataError, positive

NAMES = ("train", "validation", "test")
SPLIT_NAMES = {**{name: name for name in NAMES}, "valid": "validation", "val": "validation", "dev": "validation"}
"""Maps names of folders and files to splits."""
SPLIT = "90,5,5"
UNCHANGED = "Leave it alone and run the command again"

HELD_OUT_EVERY = 100
HELD_OUT_BYTES = 1_000_000

CorpusSettings = Mapping[str, Any]
"""`sample_bytes`, `shard_bytes` and the corpus' own options, `tokenizer` among them."""
CorpusSplits = Iterable[tuple[str, Iterable[Document]]]
"""(split, documents) in the order of the source. A document is an iterable of pieces: bytes of up to 1 MiB for the
encoder. Consume them in order: only one piece is in memory."""


Options = dict[str, dict[str, Any]]
"""Options of the command line, with settings of `ArgumentParser.add_argument`."""


def option(name: str, **settings: Any) -> Options:
    """Return an option."""
    return {name: settings}


def split_option(shares: str, default: str | None = None) -> Options:
    """Return the option --split. shares: the unit of the percentages, for its help."""
    return option("--split", default=default, metavar="TRAIN,VALIDATION,TEST", help=f"percent {shares}")


MEMBER_HELP = "file of a zip archive that contains several; a pattern such as docs/*.txt selects all that match"
SAMPLE_HELP = "bytes in a sample, rounded down to whole tokens and records (default: %(default)s)"
FILE_HELP = "bytes, or a tokenizer's file: *.model, *.json, *.txt (default: %(default)s)"
SOURCE = option("--source", nargs="+", required=True, metavar="PATH_OR_URL", help="what to read, in this order")
MEMBER = option("--member", metavar="NAME", help=MEMBER_HELP)
SAMPLE = option("--sample-bytes", type=positive, default=65_536, help=SAMPLE_HELP)
TOKENIZER = option("--tokenizer", default="bytes", metavar="NAME_OR_FILE", help=FILE_HELP)
SPLIT_OPTION = split_option("of the bytes for each split, from first to last (default: %(default)s)", SPLIT)


class Corpus(ABC):
    """A kind of source that `megasparse prepare-data NAME` reads; the docstring of a class is the command's help.

    A new corpus is a subclass and one line in `CORPORA`. Methods raise DataError for a damaged or unsuitable source,
    and ConfigError for settings that do not fit it.
    """

    EXAMPLE: ClassVar[str]
    """Its options and --output, for the command's help."""
    KIND: ClassVar[Kind] = "stream"
    """How files are read: see `Source.open`."""
    OPTIONS: ClassVar[Options] = SOURCE | MEMBER | SAMPLE
    SENTENCE_PAIRS: ClassVar[bool] = False
    """True if records are pairs of segments, so that a model can learn their order."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        for name, settings in self.OPTIONS.items():
            parser.add_argument(name, **settings)

    def open(
        self, locations: Sequence[str], member: str | None, downloads: Path, settings: CorpusSettings, workers: int
    ) -> Source:
        """Find or download the files, and read them once."""
        return Source.open(locations, member, downloads, self.KIND)

    def about(self, source: Source, settings: CorpusSettings) -> dict[str, Any]:
        """Return further entries of index.json on the source, before anything is written."""
        return {}

    @abstractmethod
    def encoder(self, settings: CorpusSettings) -> PieceEncoder:
        """Return the encoder of pieces, used by several processes at once."""

    @abstractmethod
    def splits(self, source: Source, settings: CorpusSettings) -> CorpusSplits:
        """Return the splits, a pure function of the source's content and the settings: resuming counts documents."""


class TextCorpus(Corpus):
    """A corpus of running text or of documents, with any tokenizer."""

    DOCUMENTS: ClassVar[bool] = False
    """Append the tokenizer's separator to each document."""
    LINE_ENDS: ClassVar[bool] = False
    """Count the end of a line as a reference word."""
    OPTIONS = Corpus.OPTIONS | TOKENIZER

    def encoder(self, settings: CorpusSettings) -> TextEncoder:
        documents = settings.get("documents", self.DOCUMENTS)
        return TextEncoder(settings.get("tokenizer", "bytes"), documents, self.LINE_ENDS)


def as_bytes(settings: CorpusSettings) -> bool:
    return settings.get("tokenizer", "bytes") == "bytes"


def require_full(source: Source, counts: Mapping[str, int], amount: str) -> None:
    """Raise DataError naming an empty split. amount: size of the source, for the message."""
    if empty := [name for name, count in counts.items() if not count]:
        raise DataError(source.name, f"{amount} are too few to give {empty[0]} any", "Give more, or --split 100,0,0")


def check_seed(seed: int) -> None:
    """Raise ConfigError for a negative --seed."""
    if seed < 0:
        raise ConfigError("--seed", f"{seed} is negative", "Give 0 or more")


def split_sizes(split: str, total: int) -> dict[str, int]:
    """Return the bytes of each split that is not 0 percent, in order. Raises ConfigError for a bad --split."""
    try:
        shares = [Fraction(part) for part in split.split(",")]
    except (ValueError, ZeroDivisionError):
        shares = []
    if len(shares) != len(NAMES) or sum(shares) != 100 or min(shares) < 0 or shares[0] == 0:
        raise ConfigError("--split", f'"{split}" is not three percentages that sum to 100', "Write --split 90,5,5")
    stops = [int(total * sum(shares[: i + 1]) / 100) for i in range(len(shares))]
    sizes = {name: stop - start for name, start, stop in zip(NAMES, [0, *stops], stops, strict=False)}
    return {name: sizes[name] for name, share in zip(NAMES, shares, strict=True) if share}


def split_at(byte: int, sizes: Mapping[str, int]) -> str:
    return next(name for name, stop in zip(sizes, accumulate(sizes.values()), strict=True) if byte < stop)


class ByteStream:
    """`read(n)` over an iterable of pieces of any size."""

    def __init__(self, pieces: Iterable[bytes]):
        self._pieces = filter(None, pieces)
        self._piece, self._offset = b"", 0
        self.bytes_read = 0

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes; fewer only at the end."""
        parts, missing = [], size
        while missing and self._fill():
            parts.append(self._piece[self._offset : self._offset + missing])
            self._offset += len(parts[-1])
            missing -= len(parts[-1])
        self.bytes_read += size - missing
        return b"".join(parts)

    def inside_character(self) -> bool:
        """True if the next byte continues a UTF-8 character."""
        return self._fill() and self._piece[self._offset] & 0xC0 == 0x80

    def _fill(self) -> bool:
        if self._offset == len(self._piece):
            self._piece, self._offset = next(self._pieces, b""), 0
        return self._offset < len(self._piece)


def cut(pieces: Iterable[bytes], sizes: Mapping[str, int], whole_characters: bool = False) -> CorpusSplits:
    """Cut a stream into splits of these bytes, of one document each.

    whole_characters: move a border inside a UTF-8 character to its end.
    """
    stream, stop = ByteStream(pieces), 0

    def take(stop: int) -> Iterator[bytes]:
        while stream.bytes_read < stop and (piece := stream.read(min(stop - stream.bytes_read, PIECE))):
            yield piece
        while whole_characters and stream.bytes_read >= stop and stream.inside_character():
            yield stream.read(1)

    for name, size in sizes.items():
        stop += size
        yield name, [text_pieces(take(stop))]
    while stream.read(PIECE):  # to its end, which detects a source that changed meanwhile
        pass


PART_OF_LINE = re.compile(rb"\n(?:\s*\n)?|[^\n]+")
"""Text within one line, or its end and all blank lines after it, of which hostile files contain millions."""


def lines(pieces: Iterable[bytes], longest: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number from 1 on, line without its end and leading white space) of each line that is not blank, and of the
    last one in any case; None for more than `longest` bytes.
    """
    number, parts, size = 1, list[bytes](), 0
    for piece in pieces:
        for part in PART_OF_LINE.findall(piece):
            if part[:1] == b"\n":
                if size:
                    yield number, b"".join(parts) if size <= longest else None
                number, parts, size = number + part.count(b"\n"), [], 0
            else:
                part = part if size else part.lstrip()
                size += len(part)
                parts = [*parts, part] if size <= longest else []
    yield number, b"".join(parts) if size <= longest else None


def text_pieces(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of up to 1 MiB that do not depend on the pieces of `stream`.

    A piece ends after a line; within longer lines before white space, otherwise before a character.
    """
    source, rest = ByteStream(stream), b""
    while piece := rest + source.read(PIECE - len(rest)):
        stop = _border(piece) if len(piece) == PIECE else len(piece)
        yield piece[:stop]
        rest = piece[stop:]


def _border(text: bytes) -> int:
    if line := text.rfind(b"\n") + 1:
        return line
    space = max(text.rfind(white, 1) for white in (b" ", b"\t", b"\r", b"\v", b"\f"))
    if space > 0:
        return space
    return next((i for i in range(len(text) - 1, max(0, len(text) - 5), -1) if text[i] & 0xC0 != 0x80), len(text))


class LineSample:
    """Sample of at most `size` bytes of a source in UTF-8: whole lines, evenly distributed; a pure function of it.

    Every hundredth line is held out instead, up to `HELD_OUT_BYTES` bytes. Raises DataError unless all is UTF-8.
    """

    def __init__(self, source: Source, size: int):
        source.require_text()
        self._source, self._size = source, size
        self.held_out = b""
        """Bytes of the lines held out, after `lines` or `all` has ended."""
        self.is_held_out = False

    def lines(self) -> Iterator[str]:
        """Yield lines without their ends; lines of over `LONGEST` characters in parts."""
        held_out, first = bytearray(), bytearray()
        read = sampled = 0
        for number, line in enumerate(line for piece in self._pieces() for line in segments(piece.decode())):
            raw = line.encode()
            read += len(raw)
            if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 and len(held_out) + len(raw) <= HELD_OUT_BYTES:
                held_out += raw
            elif sampled + len(raw) <= self._size * read / self._source.total_bytes:
                sampled += len(raw)
                if len(first) + len(raw) <= HELD_OUT_BYTES:
                    first += raw
                if text := line.rstrip("\r\n"):
                    yield text
        self.held_out, self.is_held_out = bytes(held_out or first), bool(held_out)

    def all(self) -> Iterator[bytes]:
        """Yield the whole source, without holding out lines, in pieces that end after a line or a file."""
        self.held_out = last = b""
        for piece in self._pieces():
            self.held_out = self.held_out or piece[:HELD_OUT_BYTES]
            yield piece or (b"" if last.endswith(b"\n") else b"\n")
            last = piece

    def _pieces(self) -> Iterator[bytes]:
        """Yield all pieces, and an empty one at the end of each file."""
        with tqdm(desc="learning from", total=self._source.total_bytes, unit="B", unit_scale=True, disable=None) as bar:
            for part in self._source.parts:
                for piece in text_pieces(part.pieces()):
                    bar.update(len(piece))
                    yield piece
                yield b""
