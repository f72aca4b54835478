"""The duplication task (Kitaev, Kaiser and Levskaya 2020, section 2.1): sequences 0w0w, w of symbols drawn for each.

Only the second half can be predicted, and only by what attention finds in the first: `model.score_from` = length/2
scores that half alone.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from megasparse.data.corpora.source import Document, Source
from megasparse.data.encoding import RecordEncoder
from megasparse.data.tokenizers.byte import ByteTokenizer
from megasparse.errors import ConfigError

HELP = "sequences 0w0w of random symbols, made here"
EXAMPLE = "--output data/duplication"
HELD_OUT = 256  # sequences of validation and of test, each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # A sequence is a sample, and there is no source to read.
    parser.set_defaults(source=[], member=None)
    parser.add_argument(
        "--length",
        type=int,
        default=1024,
        dest="sample_bytes",
        metavar="BYTES",
        help="of a sequence, twice that of 0w (default: %(default)s)",
    )
    parser.add_argument("--symbols", type=int, default=127, help="w is drawn of 1 to SYMBOLS (default: %(default)s)")
    parser.add_argument(
        "--sequences",
        type=int,
        default=12_800,
        help=f"for training (default: %(default)s); validation and test have {HELD_OUT} each",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")


def encoder(settings: Mapping[str, Any]) -> RecordEncoder:
    return RecordEncoder(ByteTokenizer.name, ByteTokenizer.sha256, record=settings["sample_bytes"])


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]:
    """The three splits, a piece a sequence: a pure function of the settings. Raises ConfigError for impossible ones."""
    length, symbols, sequences = settings["sample_bytes"], settings["symbols"], settings["sequences"]
    if length < 4 or length % 2:
        hint = f"Take an even length of 4 or more, such as {max(4, length + length % 2)}"
        raise ConfigError("--length", f"{length} is not twice the length of 0w", hint)
    if not 1 <= symbols <= 255:
        raise ConfigError("--symbols", f"{symbols} symbols and the 0 do not fit a byte", "Give 1 to 255")
    if sequences < 1:
        raise ConfigError("--sequences", f"{sequences} are too few to train on", "Give 1 or more")
    if settings["seed"] < 0:
        raise ConfigError("--seed", f"{settings['seed']} is negative", "Give 0 or more")
    counts = {"train": sequences, "validation": HELD_OUT, "test": HELD_OUT}
    return ((name, [_draw(settings["seed"], i, n, length, symbols)]) for i, (name, n) in enumerate(counts.items()))


def _draw(seed: int, split: int, count: int, length: int, symbols: int) -> Iterator[bytes]:
    """`count` sequences of one split, from raw Philox words: numpy promises those to stay the same in every version."""
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(split,)))
    for _ in range(count):
        half = bytes([0, *(1 + words.random_raw(length // 2 - 1) % symbols)])
        yield half + half
