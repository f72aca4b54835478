"""The corpora that tools/prepare_data.py knows, one file each.

A corpus module has
    HELP: one line for the command's help
    add_arguments(parser): its own options, if any
    splits(source, options): yields (split name, pieces of bytes) in the order of the source; the pieces of a split are
        used up before the next split is asked for. Nothing is held in memory but the piece at hand.
Adding a corpus is writing that file and naming it here.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

from megasparse.data.corpora import enwik8, text
from megasparse.data.corpora.source import Source


class Corpus(Protocol):
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def splits(self, source: Source, options: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[bytes]]]: ...


CORPORA = {"enwik8": cast(Corpus, enwik8), "text": cast(Corpus, text)}
