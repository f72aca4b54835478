"""Multi-query associative recall (Arora et al. 2023, Zoology): pairs of a key and its value, each key again and again.

A sequence draws `pairs` keys and a value for each, then repeats these pairs in random order. The first time, a value is
drawn of 64 and cannot be predicted; afterwards all of its 6 bits can, by whoever finds the key's earlier occurrence,
which lies 3·pairs tokens back in the mean. A key is two bytes below 160, a value one byte from 160 on.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from megasparse.data.corpora.drawn import add_drawn_arguments, drawn_splits, encoder
from megasparse.data.corpora.source import Document, Source
from megasparse.errors import ConfigError

HELP = "keys and their values, repeated far apart, made here"
EXAMPLE = "--output data/recall"
HELD_OUT = 32  # sequences of validation and of test, each
KEYS, VALUES = 160, 64
__all__ = ["EXAMPLE", "HELP", "add_arguments", "encoder", "splits"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_drawn_arguments(parser, 8192, 1024, HELD_OUT)
    parser.add_argument("--pairs", type=int, default=512, help="keys of a sequence (default: %(default)s)")


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]:
    """The three splits: a pure function of the settings. Raises ConfigError for impossible ones."""
    length, pairs = settings["sample_bytes"], settings["pairs"]
    if not 1 <= pairs <= KEYS**2:
        raise ConfigError("--pairs", f"{pairs} is no number of two-byte keys", f"Give 1 to {KEYS**2}")
    if length < 3 * pairs:
        hint = f"Give {3 * pairs} or more, or fewer --pairs"
        raise ConfigError("--length", f"{length} bytes do not hold {pairs} pairs of 3", hint)

    def draw(words: np.random.Philox) -> bytes:
        keys = np.argsort(words.random_raw(KEYS**2), kind="stable")[:pairs]
        values = KEYS + words.random_raw(pairs) % VALUES
        table = np.stack([keys // KEYS, keys % KEYS, values], axis=1).astype(np.uint8)
        return table[words.random_raw(-(-length // 3)) % pairs].tobytes()[:length]

    return drawn_splits(settings, HELD_OUT, draw)
