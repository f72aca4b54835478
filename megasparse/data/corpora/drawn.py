"""Synthetic corpora, without a source; a sequence is a sample and a record."""

import argparse
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np

from megasparse.data.corpora.corpus import Corpus, CorpusSettings, CorpusSplits, Options, check_seed, option
from megasparse.data.corpora.source import Source
from megasparse.data.encoders import RecordEncoder
from megasparse.errors import ConfigError

Draw = Callable[[np.random.Philox], bytes]
"""Draws a sequence from raw Philox words, which numpy keeps stable across versions."""


class DrawnCorpus(Corpus):
    """Base of corpora whose sequences are drawn: a pure function of the settings."""

    LENGTH: ClassVar[int]
    LENGTH_HELP: ClassVar[str] = "of a sequence"
    SEQUENCES: ClassVar[int]
    HELD_OUT: ClassVar[int]
    """Sequences of validation, and of test."""

    OPTIONS: ClassVar[Options] = {}

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.set_defaults(source=[])
        help = f"{self.LENGTH_HELP} (default: %(default)s)"
        parser.add_argument("--length", type=int, dest="sample_bytes", metavar="BYTES", default=self.LENGTH, help=help)
        counts = f"for training (default: %(default)s); validation and test have {self.HELD_OUT} each"
        parser.add_argument("--sequences", type=int, default=self.SEQUENCES, help=counts)
        parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")

    def encoder(self, settings: CorpusSettings) -> RecordEncoder:
        return RecordEncoder(settings["sample_bytes"])

    @abstractmethod
    def draw(self, settings: CorpusSettings) -> Draw:
        """Return a function that draws a sequence of `sample_bytes` bytes."""

    def splits(self, source: Source, settings: CorpusSettings) -> CorpusSplits:
        draw, sequences, seed = self.draw(settings), settings["sequences"], settings["seed"]
        if sequences < 1:
            raise ConfigError("--sequences", f"{sequences} are too few to train on", "Give 1 or more")
        check_seed(seed)

        def document(split: int, count: int) -> Iterator[bytes]:
            words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(split,)))
            return (draw(words) for _ in range(count))

        counts = {"train": sequences, "validation": self.HELD_OUT, "test": self.HELD_OUT}
        return ((name, [document(i, count)]) for i, (name, count) in enumerate(counts.items()))


class Duplication(DrawnCorpus):
    """The duplication task (Kitaev, Kaiser and Levskaya 2020, section 2.1): sequences 0w0w, w of random symbols.

    Only the second half can be predicted, by attention to the first: `model.score_from` = length/2 scores that half.
    """

    EXAMPLE = "--output data/duplication"
    LENGTH, SEQUENCES, HELD_OUT = 1024, 12_800, 256
    LENGTH_HELP = "of a sequence, twice that of 0w"

    OPTIONS = option("--symbols", type=int, default=127, help="w is drawn of 1 to SYMBOLS (default: %(default)s)")

    def draw(self, settings: CorpusSettings) -> Draw:
        length, symbols = settings["sample_bytes"], settings["symbols"]
        if length < 4 or length % 2:
            raise ConfigError(
                "--length",
                f"{length} is not twice the length of 0w",
                f"Take an even one, such as {max(4, length + length % 2)}",
            )
        if not 1 <= symbols <= 255:
            raise ConfigError("--symbols", f"{symbols} symbols and the 0 do not fit a byte", "Give 1 to 255")
        return lambda words: 2 * bytes([0, *(1 + words.random_raw(length // 2 - 1) % symbols)])


class Recall(DrawnCorpus):
    """Multi-query associative recall (Arora et al. 2023, Zoology): pairs of a key and its value, each key repeatedly.

    A sequence draws `pairs` keys and a value for each, then repeats these pairs in random order. The first time, a
    value is drawn of 64 and cannot be predicted; afterwards all of its 6 bits can, by a model that finds the key's
    earlier occurrence, on average 3·pairs tokens back. A key is two bytes below 160, a value one byte from 160 on.
    """

    EXAMPLE = "--output data/recall"
    LENGTH, SEQUENCES, HELD_OUT = 8192, 1024, 32
    KEYS, VALUES = 160, 64

    OPTIONS = option("--pairs", type=int, default=512, help="keys of a sequence (default: %(default)s)")

    def draw(self, settings: CorpusSettings) -> Draw:
        length, pairs = settings["sample_bytes"], settings["pairs"]
        if not 1 <= pairs <= self.KEYS**2:
            raise ConfigError("--pairs", f"{pairs} is no number of two-byte keys", f"Give 1 to {self.KEYS**2}")
        if length < 3 * pairs:
            raise ConfigError("--length", f"{length} bytes do not hold {pairs} pairs of 3", f"Give {3 * pairs} or more")

        def sequence(words: np.random.Philox) -> bytes:
            keys = np.argsort(words.random_raw(self.KEYS**2), kind="stable")[:pairs]
            values = self.KEYS + words.random_raw(pairs) % self.VALUES
            table = np.stack([keys // self.KEYS, keys % self.KEYS, values], axis=1).astype(np.uint8)
            return table[words.random_raw(-(-length // 3)) % pairs].tobytes()[:length]

        return sequence
