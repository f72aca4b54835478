"""What corpora share whose sequences are drawn here: a sequence is a sample and a record, and there is no source."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from megasparse.data.corpora.source import Document
from megasparse.data.encoding import RecordEncoder
from megasparse.data.tokenizers.byte import ByteTokenizer
from megasparse.errors import ConfigError


def add_drawn_arguments(
    parser: argparse.ArgumentParser, length: int, sequences: int, held_out: int, what: str = "of a sequence"
) -> None:
    """--length (help: `what`), --sequences and --seed, with their defaults."""
    parser.set_defaults(source=[], member=None)
    given: dict[str, Any] = {"type": int, "dest": "sample_bytes", "metavar": "BYTES"}
    parser.add_argument("--length", default=length, help=f"{what} (default: %(default)s)", **given)
    counts = f"for training (default: %(default)s); validation and test have {held_out} each"
    parser.add_argument("--sequences", type=int, default=sequences, help=counts)
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")


def encoder(settings: Mapping[str, Any]) -> RecordEncoder:
    return RecordEncoder(ByteTokenizer.name, ByteTokenizer.sha256, record=settings["sample_bytes"])


def drawn_splits(
    settings: Mapping[str, Any], held_out: int, draw: Callable[[np.random.Philox], bytes]
) -> Iterator[tuple[str, Iterable[Document]]]:
    """The three splits, a piece a sequence. draw: makes a sequence of raw words, which numpy promises to stay the same
    in every version. Raises ConfigError for impossible settings.
    """
    sequences, seed = settings["sequences"], settings["seed"]
    if sequences < 1:
        raise ConfigError("--sequences", f"{sequences} are too few to train on", "Give 1 or more")
    if seed < 0:
        raise ConfigError("--seed", f"{seed} is negative", "Give 0 or more")

    def document(split: int, count: int) -> Iterator[bytes]:
        words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(split,)))
        return (draw(words) for _ in range(count))

    counts = {"train": sequences, "validation": held_out, "test": held_out}
    return ((name, [document(i, count)]) for i, (name, count) in enumerate(counts.items()))
