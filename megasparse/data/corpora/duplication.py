"""The duplication task (Kitaev, Kaiser and Levskaya 2020, section 2.1): sequences 0w0w, w of symbols drawn for each.

Only the second half can be predicted, and only by what attention finds in the first: `model.score_from` = length/2
scores that half alone.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from megasparse.data.corpora.drawn import add_drawn_arguments, drawn_splits, encoder
from megasparse.data.corpora.source import Document, Source
from megasparse.errors import ConfigError

HELP = "sequences 0w0w of random symbols, made here"
EXAMPLE = "--output data/duplication"
HELD_OUT = 256  # sequences of validation and of test, each
__all__ = ["EXAMPLE", "HELP", "add_arguments", "encoder", "splits"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_drawn_arguments(parser, 1024, 12_800, HELD_OUT, "of a sequence, twice that of 0w")
    parser.add_argument("--symbols", type=int, default=127, help="w is drawn of 1 to SYMBOLS (default: %(default)s)")


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]:
    """The three splits: a pure function of the settings. Raises ConfigError for impossible ones."""
    length, symbols = settings["sample_bytes"], settings["symbols"]
    if length < 4 or length % 2:
        hint = f"Take an even length of 4 or more, such as {max(4, length + length % 2)}"
        raise ConfigError("--length", f"{length} is not twice the length of 0w", hint)
    if not 1 <= symbols <= 255:
        raise ConfigError("--symbols", f"{symbols} symbols and the 0 do not fit a byte", "Give 1 to 255")

    def draw(words: np.random.Philox) -> bytes:
        half = bytes([0, *(1 + words.random_raw(length // 2 - 1) % symbols)])
        return half + half

    return drawn_splits(settings, HELD_OUT, draw)
