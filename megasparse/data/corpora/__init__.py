"""The corpora that tools/prepare_data.py knows, one file each.

A corpus module has
    HELP: one line for the command's help
    add_arguments(parser): its options, those of a source among them where it reads one
    splits(source, settings): yields (split name, pieces of bytes) in the order of the source; the pieces of a split are
        used up before the next split is asked for. Nothing is held in memory but the piece at hand. settings: of the
        index, `sample_bytes`, `shard_bytes` and the corpus' own.
Adding a corpus is writing that file and naming it here.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

from megasparse.data.corpora import duplication, enwik8, text
from megasparse.data.corpora.source import Source


class Corpus(Protocol):
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def splits(self, source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[bytes]]]: ...


CORPORA = {
    "enwik8": cast(Corpus, enwik8),
    "text": cast(Corpus, text),
    "duplication": cast(Corpus, duplication),
}
