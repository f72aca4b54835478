"""Turn a corpus into webdataset shards and the index.json that training reads.

    python tools/prepare_data.py enwik8 --source https://mattmahoney.net/dc/enwik8.zip --output data/enwik8
    python tools/prepare_data.py enwik8 --source ~/Downloads/enwik8 --output data/enwik8
    python tools/prepare_data.py text --source book.txt --output data/book            (a CPU, a second)
    python tools/prepare_data.py text --source books/ --split 98,1,1 --output data/books
    python tools/prepare_data.py text --source archive.zip --member path/in/it/dump.xml.bz2 --output data/dump
    python tools/prepare_data.py duplication --output data/duplication                (a CPU, a second)

A source is a file, a folder of files (taken in the order of their paths) or an http(s) URL; .gz, .bz2, .xz and members
of zip archives are decompressed as they are read. A URL is downloaded once, into OUTPUT/.download. Interrupted, the
same command goes on where it stopped; no partial shard is ever left under a shard's name.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megasparse.data.corpora import CORPORA
from megasparse.data.corpora.source import Source, positive
from megasparse.data.index import Index
from megasparse.data.prepare import prepare
from megasparse.errors import report_user_errors

COMMON = {"corpus", "source", "member", "output", "sample_bytes", "shard_bytes"}


def build_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="prepare_data.py", description=__doc__, formatter_class=raw)
    corpora = parser.add_subparsers(dest="corpus", required=True)
    for name, corpus in CORPORA.items():
        part = corpora.add_parser(name, help=corpus.HELP, description=__doc__, formatter_class=raw)
        part.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the shards")
        part.add_argument(
            "--shard-bytes", type=positive, default=67_108_864, help="bytes of text in a shard (default: %(default)s)"
        )
        corpus.add_arguments(part)
    return parser


@report_user_errors
def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    given = build_parser().parse_args(arguments)
    written = prepare(
        given.corpus,
        Source.open(given.source, given.member, given.output / ".download"),
        given.output,
        options={key: value for key, value in vars(given).items() if key not in COMMON},
        sample_bytes=given.sample_bytes,
        shard_bytes=given.shard_bytes,
        command=shlex.join(["python", "tools/prepare_data.py", *arguments]),
    )
    print(f"{given.output}: {'prepared' if written else 'already prepared'}")
    for name, split in Index.load(given.output).file.splits.items():
        print(f"  {name}: {split.tokens:,} tokens in {split.samples:,} samples, {len(split.shards)} shards")


if __name__ == "__main__":
    main()
