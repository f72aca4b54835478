"""WikiText-103 (Merity et al. 2016): wiki.{train,valid,test}.tokens, or .raw, in a folder or in the official archive.

Each split is one stream of lines, as it comes. Reference words: what stands between white space, and one end of line
for each line, so that word perplexities are those of the literature (245,569 words in the test split).

Published checksums: the files' SHA-1 are GluonNLP's (gluonnlp.data.WikiText103 and WikiText103Raw), numbers of lines
torchtext's (torchtext.datasets.WikiText103).
"""

import argparse
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megasparse.data.corpora.cutting import text_pieces
from megasparse.data.corpora.source import Document, Part, Source, add_source_arguments, add_tokenizer_argument
from megasparse.data.text_encoder import TextEncoder
from megasparse.errors import DataError

HELP = "WikiText-103: wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, or the official zip"
EXAMPLE = "--source wikitext-103-v1.zip --tokenizer tokenizers/wikitext103.txt --output data/wikitext103"
FILES = True
SPLITS = {"train": "train", "validation": "valid", "test": "test"}
LINES = {"train": 1_801_350, "validation": 3_760, "test": 4_358}
SHA1 = {
    "tokens": {
        "train": "b7497e2dfe77e72cfef5e3dbc61b7b53712ac211",
        "validation": "c326ac59dc587676d58c422eb8a03e119582f92b",
        "test": "8a5befc548865cec54ed4273cf87dbbad60d1e47",
    },
    "raw": {
        "train": "3d06627c15e834408cfee91293f862c11c1cc9ef",
        "validation": "db78d4db83700cba1b1bf4a9381087043db2876d",
        "test": "6f1fe2054a940eebfc76b284b09680763b37f5ea",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The splits are the official ones: figures on them are comparable because everyone splits alike."""
    add_source_arguments(parser)
    add_tokenizer_argument(parser)


def encoder(settings: Mapping[str, Any]) -> TextEncoder:
    return TextEncoder(settings.get("tokenizer", "bytes"), line_ends=True)


def about(source: Source, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of the files, and whether they are all three official ones. Other files are taken, and called that.

    Raises DataError for what is not UTF-8, where no file is WikiText's, and for a file with as many lines as the
    official one but another checksum: it is damaged.
    """
    source.require_text()
    kind, files = _files(source)
    official = 0
    for name, part in files.items():
        digest, lines = hashlib.sha1(usedforsecurity=False), 0
        for piece in part.pieces():
            digest.update(piece)
            lines += piece.count(b"\n")
        sha1, published = digest.hexdigest(), SHA1[kind][name]
        if lines == LINES[name] and sha1 != published:
            raise DataError(str(part), f"its sha1 is {sha1}, the official file's is {published}", "Download it again")
        official += sha1 == published
    return {"kind": kind, "official": official == len(SPLITS)}


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]:
    """The splits whose files are there."""
    for name, part in _files(source)[1].items():
        yield name, [text_pieces(part.pieces())]


def _files(source: Source) -> tuple[str, dict[str, Part]]:
    """Return "tokens" or "raw", and the file of each split."""
    found: dict[str, dict[str, Part]] = {kind: {} for kind in SHA1}
    for part in source.parts:
        for kind, files in found.items():
            for name, infix in SPLITS.items():
                if part.name.rpartition("/")[2] == f"wiki.{infix}.{kind}":
                    if name in files:
                        raise DataError(str(part), f"{files[name]} is the same split", "Give one of the two")
                    files[name] = part
    kinds = [kind for kind, files in found.items() if files]
    if len(kinds) != 1:
        problem = "there are both .tokens and .raw files" if kinds else "there is no wiki.train.tokens"
        hint = "Give wiki.train, wiki.valid and wiki.test, all .tokens or all .raw, or the official zip"
        raise DataError(source.name, problem, hint)
    files = found[kinds[0]]
    return kinds[0], {name: files[name] for name in SPLITS if name in files}
