"""Turn a corpus into webdataset shards and the index.json that training reads.

    megasparse prepare-data enwik8 --source https://mattmahoney.net/dc/enwik8.zip --output data/enwik8
    megasparse prepare-data text --source book.txt --output data/book            (a CPU, a second)
    megasparse prepare-data text --source archive.zip --member path/in/it/dump.xml.bz2 --output data/dump
    megasparse prepare-data text --source books/ --tokenizer tokenizers/books.model --output data/books
    megasparse prepare-data jsonl --source gs://bucket/crawl/*.jsonl.gz --deduplicate --output data/crawl
    megasparse prepare-data CORPUS --help                                        (an example for each corpus)

A source is a file, a folder of files (taken in the order of their paths) or a URL (http(s), s3, gs, az, hf); .gz, .bz2,
.xz, .zst and members of zip archives are decompressed as they are read. A URL is downloaded once, into
OUTPUT/.download. Interrupted, the same command continues where it stopped; no partial shard is ever left under a
shard's name. The number of workers changes no byte. Of records (jsonl, parquet, huggingface), report.json and
lengths.svg beside the shards say what was read, what was left out, and how long the texts are.
"""

import argparse
import inspect
import os
import sys
from pathlib import Path

from megasparse.data.corpora import CORPORA
from megasparse.data.corpora.corpus import positive
from megasparse.data.corpora.records import RecordSource, write_report
from megasparse.data.index import Index
from megasparse.data.prepare import prepare
from megasparse.errors import ConfigError
from megasparse.evaluation.figure import draw_lengths

COMMON = {"command", "corpus", "source", "member", "output", "sample_bytes", "shard_bytes", "workers"}
WORKER_BYTES = 8 << 20
"""Bytes of the source below which another worker takes longer to start than it saves."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    corpora = parser.add_subparsers(dest="corpus", required=True)
    for name, corpus in CORPORA.items():
        description = f"{inspect.getdoc(corpus)}\n\n    megasparse prepare-data {name} {corpus.EXAMPLE}"
        part = corpora.add_parser(name, help=corpus.HELP, description=description, formatter_class=raw)
        part.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the shards")
        part.add_argument(
            "--shard-bytes", type=positive, default=67_108_864, help="bytes of text in a shard (default: %(default)s)"
        )
        part.add_argument("--workers", type=positive, help="processes that make tokens (default: the cores)")
        corpus.add_arguments(part)


def run(args: argparse.Namespace) -> None:
    options = {key: value for key, value in vars(args).items() if key not in COMMON}
    cores = len(os.sched_getaffinity(0))
    corpus, downloads = CORPORA[args.corpus], args.output / ".download"
    source = corpus.open(args.source, getattr(args, "member", None), downloads, options, args.workers or cores)
    if source.empty:
        print(f"left out, because they are empty: {len(source.empty)} files ({source.empty[0]}, …)", file=sys.stderr)
    written = prepare(
        args.corpus,
        source,
        args.output,
        options=options,
        sample_bytes=args.sample_bytes,
        shard_bytes=args.shard_bytes,
        command=args.command,
        workers=args.workers or min(cores, 1 + source.total_bytes // WORKER_BYTES),
    )
    print(f"{args.output}: {'prepared' if written else 'already prepared'}")
    index = Index.load(args.output)
    for name, split in index.file.splits.items():
        words = f" ({split.words:,} words)" if split.words else ""
        records = f"{split.tokens // index.record:,} records, " if index.record else ""
        size = f"{split.tokens:,} tokens in {split.samples:,} samples, {len(split.shards)} shards{words}"
        print(f"  {name}: {records}{size}")
    if isinstance(source, RecordSource):
        _report(source, args.output)


def _report(source: RecordSource, output: Path) -> None:
    found = write_report(source, Index.load(output), output / "report.json")
    print(f"  {found.records:,} records in {found.files:,} files")
    print(f"  kept: {found.documents:,} documents of {found.bytes:,} bytes, {found.lengths.mean:,.0f} in the mean")
    for reason, count in found.left_out.items():
        print(f"  left out: {count:,} {reason}")
    try:
        draw_lengths(found.lengths, output / "lengths.svg")
    except ConfigError as without_matplotlib:
        print(f"  no picture of the lengths: {without_matplotlib}")
