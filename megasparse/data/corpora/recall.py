"""Multi-query associative recall (Arora et al. 2023, Zoology): pairs of a key and its value, each key again and again.

A sequence draws `pairs` keys and a value for each, then repeats these pairs in random order. The first time, a value is
drawn of 64 and cannot be predicted; afterwards all of its 6 bits can, by whoever finds the key's earlier occurrence,
which lies 3·pairs tokens back in the mean. A key is two bytes below 160, a value one byte from 160 on.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from megasparse.data.corpora.source import Document, Source
from megasparse.data.encoding import RecordEncoder
from megasparse.data.tokenizers.byte import ByteTokenizer
from megasparse.errors import ConfigError

HELP = "keys and their values, repeated far apart, made here"
EXAMPLE = "--output data/recall"
HELD_OUT = 32  # sequences of validation and of test, each
KEYS, VALUES = 160, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # A sequence is a sample, and there is no source to read.
    parser.set_defaults(source=[], member=None)
    parser.add_argument(
        "--length", type=int, default=8192, dest="sample_bytes", metavar="BYTES", help="of a sequence (default: 8192)"
    )
    parser.add_argument("--pairs", type=int, default=512, help="keys of a sequence (default: %(default)s)")
    parser.add_argument(
        "--sequences",
        type=int,
        default=1024,
        help=f"for training (default: %(default)s); validation and test have {HELD_OUT} each",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")


def encoder(settings: Mapping[str, Any]) -> RecordEncoder:
    return RecordEncoder(ByteTokenizer.name, ByteTokenizer.sha256, record=settings["sample_bytes"])


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]:
    """The three splits, a piece a sequence: a pure function of the settings. Raises ConfigError for impossible ones."""
    length, pairs = settings["sample_bytes"], settings["pairs"]
    if not 1 <= pairs <= KEYS**2:
        raise ConfigError("--pairs", f"{pairs} is no number of two-byte keys", f"Give 1 to {KEYS**2}")
    if length < 3 * pairs:
        raise ConfigError(
            "--length", f"{length} bytes do not hold {pairs} pairs of 3", f"Give {3 * pairs} or more, or fewer --pairs"
        )
    if settings["sequences"] < 1:
        raise ConfigError("--sequences", f"{settings['sequences']} are too few to train on", "Give 1 or more")
    if settings["seed"] < 0:
        raise ConfigError("--seed", f"{settings['seed']} is negative", "Give 0 or more")
    counts = {"train": settings["sequences"], "validation": HELD_OUT, "test": HELD_OUT}
    return ((name, [_draw(settings["seed"], i, n, length, pairs)]) for i, (name, n) in enumerate(counts.items()))


def _draw(seed: int, split: int, count: int, length: int, pairs: int) -> Iterator[bytes]:
    """`count` sequences of one split, from raw Philox words: numpy promises those to stay the same in every version."""
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(split,)))
    for _ in range(count):
        keys = np.argsort(words.random_raw(KEYS**2), kind="stable")[:pairs]
        values = KEYS + words.random_raw(pairs) % VALUES
        table = np.stack([keys // KEYS, keys % KEYS, values], axis=1).astype(np.uint8)
        yield table[words.random_raw(-(-length // 3)) % pairs].tobytes()[:length]
