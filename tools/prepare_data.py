"""Turn a corpus into webdataset shards and the index.json that training reads.

    python tools/prepare_data.py enwik8 --source https://mattmahoney.net/dc/enwik8.zip --output data/enwik8
    python tools/prepare_data.py text --source book.txt --output data/book            (a CPU, a second)
    python tools/prepare_data.py text --source archive.zip --member path/in/it/dump.xml.bz2 --output data/dump
    python tools/prepare_data.py text --source books/ --tokenizer tokenizers/books.model --output data/books
    python tools/prepare_data.py duplication --output data/duplication                (a CPU, a second)
    python tools/prepare_data.py CORPUS --help                                        (an example of each corpus)

A source is a file, a folder of files (taken in the order of their paths) or an http(s) URL; .gz, .bz2, .xz and members
of zip archives are decompressed as they are read. A URL is downloaded once, into OUTPUT/.download. Interrupted, the
same command goes on where it stopped; no partial shard is ever left under a shard's name. The number of workers
changes no byte.
"""

import argparse
import inspect
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megasparse.data.corpora import CORPORA, shards
from megasparse.data.corpora.source import Kind, Source, positive
from megasparse.data.index import Index
from megasparse.data.prepare import prepare
from megasparse.errors import report_user_errors

COMMON = {"corpus", "source", "member", "output", "sample_bytes", "shard_bytes", "workers"}
WORKER_BYTES = 8 << 20  # of the source, below which another worker takes longer to start than to help


def build_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="prepare_data.py", description=__doc__, formatter_class=raw)
    corpora = parser.add_subparsers(dest="corpus", required=True)
    for name, corpus in CORPORA.items():
        description = f"{inspect.getdoc(corpus)}\n\n    python tools/prepare_data.py {name} {corpus.EXAMPLE}"
        part = corpora.add_parser(name, help=corpus.HELP, description=description, formatter_class=raw)
        part.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the shards")
        part.add_argument(
            "--shard-bytes", type=positive, default=67_108_864, help="bytes of text in a shard (default: %(default)s)"
        )
        part.add_argument("--workers", type=positive, help="processes that make tokens (default: the cores)")
        corpus.add_arguments(part)
    description = f"{inspect.getdoc(shards)}\n\n    python tools/prepare_data.py shards {shards.EXAMPLE}"
    shards.add_arguments(corpora.add_parser("shards", help=shards.HELP, description=description, formatter_class=raw))
    return parser


def kind_of(corpus: object, documents: bool) -> Kind:
    """How the corpus takes its source."""
    if getattr(corpus, "RAW", False):
        return "raw"
    return "files" if documents or getattr(corpus, "FILES", False) else "stream"


@report_user_errors
def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "tools/prepare_data.py", *arguments])
    given = build_parser().parse_args(arguments)
    if given.corpus == "shards":
        print(f"{shards.write(given, command)}: indexed")
        return
    kind = kind_of(CORPORA[given.corpus], getattr(given, "documents", False))
    source = Source.open(given.source, given.member, given.output / ".download", kind)
    if source.empty:
        print(
            f"left out, as there is nothing in them: {len(source.empty)} files ({source.empty[0]}, …)", file=sys.stderr
        )
    cores = min(len(os.sched_getaffinity(0)), 1 + source.total_bytes // WORKER_BYTES)
    written = prepare(
        given.corpus,
        source,
        given.output,
        options={key: value for key, value in vars(given).items() if key not in COMMON},
        sample_bytes=given.sample_bytes,
        shard_bytes=given.shard_bytes,
        command=command,
        workers=given.workers or cores,
    )
    print(f"{given.output}: {'prepared' if written else 'already prepared'}")
    for name, split in Index.load(given.output).file.splits.items():
        words = f" ({split.words:,} words)" if split.words else ""
        print(f"  {name}: {split.tokens:,} tokens in {split.samples:,} samples, {len(split.shards)} shards{words}")


if __name__ == "__main__":
    main()
