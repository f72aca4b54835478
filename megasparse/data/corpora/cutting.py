"""How text is cut: into splits by percent of its bytes, and into pieces that end where lines do."""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

from megasparse.errors import ConfigError

PIECE = 1 << 20
NAMES = ("train", "validation", "test")
SPLIT = "90,5,5"


def add_split_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--split",
        default=SPLIT,
        metavar="TRAIN,VALIDATION,TEST",
        help="percent of the bytes for each split, from first to last (default: %(default)s)",
    )


def split_sizes(split: str, total: int) -> dict[str, int]:
    """Bytes of each split that is not 0 percent, in order. Raises ConfigError for a bad --split."""
    try:
        shares = [Fraction(part) for part in split.split(",")]
    except (ValueError, ZeroDivisionError):
        shares = []
    if len(shares) != len(NAMES) or sum(shares) != 100 or min(shares) < 0 or shares[0] == 0:
        problem = f'"{split}" is not three percentages that sum to 100, the first above 0'
        raise ConfigError("--split", problem, "Write for example --split 90,5,5")
    stops = [int(total * sum(shares[: i + 1]) / 100) for i in range(len(shares))]
    sizes = {name: stop - start for name, start, stop in zip(NAMES, [0, *stops], stops, strict=False)}
    return {name: sizes[name] for name, share in zip(NAMES, shares, strict=True) if share}


def split_at(byte: int, sizes: Mapping[str, int]) -> str:
    """The split that a byte of the source lies in."""
    stop = 0
    for name, size in sizes.items():
        stop += size
        if byte < stop:
            return name
    raise AssertionError(f"byte {byte} is behind the end")


class ByteStream:
    """`read(n)` over an iterable of pieces of any size."""

    def __init__(self, pieces: Iterable[bytes]):
        self._pieces = filter(None, pieces)
        self._rest = b""
        self.position = 0

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end."""
        parts, missing = [], size
        while missing and self._fill():
            parts.append(self._rest[:missing])
            self._rest = self._rest[missing:]
            missing -= len(parts[-1])
        self.position += size - missing
        return b"".join(parts)

    def inside_character(self) -> bool:
        """Whether the next byte is a later one of a UTF-8 character."""
        return self._fill() and self._rest[0] & 0xC0 == 0x80

    def _fill(self) -> bool:
        self._rest = self._rest or next(self._pieces, b"")
        return bool(self._rest)


def cut(
    pieces: Iterable[bytes], sizes: Mapping[str, int], whole_characters: bool = False
) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Cut a stream into (name, stream of `size` bytes), in turn; each is used up before the next is asked for.

    whole_characters: a border inside a UTF-8 character moves to its end.
    """
    stream, stop = ByteStream(pieces), 0
    for name, size in sizes.items():
        stop += size
        yield name, _take(stream, stop, whole_characters)
    while stream.read(PIECE):  # to its end, where a source that changed meanwhile is found out
        pass


def lines(pieces: Iterable[bytes], longest: int) -> Iterator[bytes | None]:
    """Lines without their ends; None for one of more than `longest` bytes, of which nothing is kept."""
    parts: list[bytes] = []
    size = 0
    for piece in pieces:
        for number, text in enumerate(piece.split(b"\n")):
            if number:
                yield b"".join(parts) if size <= longest else None
                parts, size = [], 0
            size += len(text)
            if size > longest:
                parts.clear()
            else:
                parts.append(text)
    if size:
        yield b"".join(parts) if size <= longest else None


def _take(stream: ByteStream, stop: int, whole_characters: bool) -> Iterator[bytes]:
    while stream.position < stop:
        piece = stream.read(min(stop - stream.position, PIECE))
        if not piece:
            return
        yield piece
    while whole_characters and stream.inside_character():
        yield stream.read(1)


def text_pieces(stream: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of up to 1 MiB that depend on nothing but them.

    A piece ends with a line; in longer lines before white space, and without any before a character.
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
    last = range(len(text) - 1, max(0, len(text) - 5), -1)
    return next((i for i in last if text[i] & 0xC0 != 0x80), len(text))
