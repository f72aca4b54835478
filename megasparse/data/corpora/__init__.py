"""The corpora that megasparse prepare-data knows, one file each.

A corpus module has
    HELP: one line for the command's help
    EXAMPLE: its options and --output, for the command's help
    add_arguments(parser): its options, those of a source among them where it reads one
    splits(source, settings): yields (split name, documents) in the order of the source. A document is an iterable of
        pieces: bytes of up to about 1 MiB that the encoder takes. Documents of a split and pieces of a document are
        used up in turn before the next is asked for; nothing is held in memory but the piece at hand. They are a pure
        function of the source's content and the settings, so that an interrupted preparation can go on by counting.
        settings: `sample_bytes`, `shard_bytes` and the corpus' own options (`tokenizer` among them).
    encoder(settings): the encoder that makes tokens of a piece, in several processes at once (data/encoding.py)
and may have
    about(source, settings): what index.json says of the source besides its size and sha256. It is called before
        anything is written: the place to refuse a source that is damaged or unfit
    FILES = True: the source is taken file by file, those in zip archives among them, and their names mean something.
        Without it, it is one stream of bytes
    RAW = True: files are taken as they are, neither decompressed nor opened as archives
    open_source(locations, member, downloads, settings, workers): the source, where `Source.open` is not what reads it
Adding a corpus is writing that file and naming it here.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

from megasparse.data.corpora import (
    bookcorpus,
    cifar10,
    duplication,
    enwik8,
    huggingface,
    imagenet64,
    images,
    jsonl,
    pairs,
    parallel,
    parquet,
    pg19,
    recall,
    text,
    wikitext103,
)
from megasparse.data.corpora.source import Document, Source
from megasparse.data.encoding import Encoder


class Corpus(Protocol):
    HELP: str
    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def splits(self, source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]: ...

    def encoder(self, settings: Mapping[str, Any]) -> Encoder: ...


CORPORA = {
    "enwik8": cast(Corpus, enwik8),
    "text": cast(Corpus, text),
    "jsonl": cast(Corpus, jsonl),
    "parquet": cast(Corpus, parquet),
    "huggingface": cast(Corpus, huggingface),
    "bookcorpus": cast(Corpus, bookcorpus),
    "pg19": cast(Corpus, pg19),
    "wikitext103": cast(Corpus, wikitext103),
    "images": cast(Corpus, images),
    "imagenet64": cast(Corpus, imagenet64),
    "cifar10": cast(Corpus, cifar10),
    "pairs": cast(Corpus, pairs),
    "parallel": cast(Corpus, parallel),
    "duplication": cast(Corpus, duplication),
    "recall": cast(Corpus, recall),
}
