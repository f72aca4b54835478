"""Any text: one file, several or a folder, one after another as they are, split by byte position."""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from megasparse.data.corpora.source import Source, add_source_arguments, cut
from megasparse.errors import ConfigError, DataError

HELP = "any text files, split by byte position"
NAMES = ("train", "validation", "test")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument(
        "--split",
        default="90,5,5",
        metavar="TRAIN,VALIDATION,TEST",
        help="percent of the bytes for each split, from first to last (default: 90,5,5)",
    )


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[bytes]]]:
    """The splits that are not 0 percent. Raises ConfigError for a bad --split, DataError when a split gets no byte."""
    shares = _shares(settings["split"])
    stops = [int(source.total_bytes * sum(shares[: i + 1]) / 100) for i in range(len(shares))]
    sizes = {name: stop - start for name, start, stop in zip(NAMES, [0, *stops], stops, strict=False)}
    wanted = {name: sizes[name] for name, share in zip(NAMES, shares, strict=True) if share}
    for name, size in wanted.items():
        if size == 0:
            problem = f"{source.total_bytes} bytes are too few to give {name} any"
            raise DataError(source.name, problem, "Give more text, or another --split")
    return cut(source.pieces(), wanted)


def _shares(split: str) -> list[Fraction]:
    try:
        shares = [Fraction(part) for part in split.split(",")]
    except (ValueError, ZeroDivisionError):
        shares = []
    if len(shares) != len(NAMES) or sum(shares) != 100 or min(shares) < 0 or shares[0] == 0:
        problem = f'"{split}" is not three percentages that sum to 100, the first above 0'
        raise ConfigError("--split", problem, "Write for example --split 90,5,5")
    return shares
