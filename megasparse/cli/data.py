"""Commands that prepare data and tokenizers."""

import argparse
import inspect
import re
from pathlib import Path
from typing import Any

from megasparse.errors import ConfigError, DataError, positive
from megasparse.system import usable_cores

COMMON = {"command", "corpus", "source", "member", "output", "sample_bytes", "shard_bytes", "workers"}
WORKER_BYTES = 8 << 20
"""Bytes of the source per worker, below which starting another worker takes longer than it saves."""


def add_prepare_data(parser: argparse.ArgumentParser) -> None:
    from megasparse.data.corpora import CORPORA

    raw = argparse.RawDescriptionHelpFormatter
    corpora = parser.add_subparsers(dest="corpus", required=True)
    for name, corpus in CORPORA.items():
        text = inspect.getdoc(corpus) or ""
        purpose = re.split(r"\.\s+(?=[A-Z])|\n\n", text)[0]
        description = f"{text}\n\n    megasparse prepare-data {name} {corpus.EXAMPLE}"
        part = corpora.add_parser(name, help=purpose, description=description, formatter_class=raw)
        part.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the shards")
        part.add_argument(
            "--shard-bytes", type=positive, default=64 << 20, help="bytes of text per shard (%(default)s)"
        )
        part.add_argument("--workers", type=positive, help="tokenizer processes (default: number of cores)")
        corpus.add_arguments(part)


def prepare_data(args: argparse.Namespace) -> None:
    """Convert a corpus to webdataset shards and the index.json that training reads.

        megasparse prepare-data enwik8 --source https://mattmahoney.net/dc/enwik8.zip --output data/enwik8
        megasparse prepare-data text --source book.txt --output data/book            (a second on a CPU)
        megasparse prepare-data text --source archive.zip --member path/in/it/dump.xml.bz2 --output data/dump
        megasparse prepare-data text --source books/ --tokenizer tokenizers/books.model --output data/books
        megasparse prepare-data jsonl --source gs://bucket/crawl/*.jsonl.gz --deduplicate --output data/crawl
        megasparse prepare-data CORPUS --help                                        (an example for each corpus)

    A source is a file, a folder of files (read in the order of their paths) or a URL (http(s), s3, gs, az, hf). .gz,
    .bz2, .xz, .zst and members of zip archives are decompressed on the fly. URLs are downloaded once, to
    OUTPUT/.download. If it was interrupted, run the same command again. The output does not depend on --workers. For
    records (jsonl, parquet, huggingface), report.json and lengths.svg list what was read and skipped, and lengths.
    """
    from megasparse.data.corpora import CORPORA
    from megasparse.data.corpora.records import RecordSource, write_report
    from megasparse.data.index import Index

    options = {key: value for key, value in vars(args).items() if key not in COMMON}
    cores = usable_cores()
    corpus, downloads = CORPORA[args.corpus], args.output / ".download"
    source = corpus.open(args.source, getattr(args, "member", None), downloads, options, args.workers or cores)
    from megasparse.data.prepare import prepare
    from megasparse.evaluation.outputs import draw_lengths

    written = prepare(
        args.corpus, source, args.output, options=options, sample_bytes=args.sample_bytes, shard_bytes=args.shard_bytes,
        command=args.command, workers=args.workers or min(cores, 1 + source.total_bytes // WORKER_BYTES),
    )  # fmt: skip
    print(f"{args.output}: {'prepared' if written else 'already prepared'}")
    index = Index.load(args.output)
    for name, split in index.file.splits.items():
        words = f" ({split.words:,} words)" if split.words else ""
        records = f"{split.tokens // index.record:,} records, " if index.record else ""
        size = f"{split.tokens:,} tokens in {split.samples:,} samples, {len(split.shards)} shards{words}"
        print(f"  {name}: {records}{size}")
    if not isinstance(source, RecordSource) or index.record:  # conversations, which `about` reports
        return
    report = write_report(source, index.file.splits, args.output / "report.json")
    print(f"  {report['records']:,} records in {report['files']:,} files")
    size = f"{report['documents']:,} documents of {report['bytes']:,} bytes"
    print(f"  kept: {size}, {report['lengths']['mean']:,.0f} on average")
    for reason, count in report["left_out"].items():
        print(f"  left out: {count:,} {reason}")
    draw_lengths(report["lengths"], args.output / "lengths.svg")


SUFFIXES = {"sentencepiece": ".model", "words": ".txt"}


def add_train_tokenizer(parser: argparse.ArgumentParser) -> None:
    from megasparse.data.corpora.corpus import MEMBER, SOURCE

    help, raw = inspect.getdoc(train_tokenizer), argparse.RawDescriptionHelpFormatter
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    kinds = parser.add_subparsers(dest="kind", required=True)
    purposes = {
        "sentencepiece": "pieces of words, with a fallback to bytes",
        "words": "whole words, for adaptive softmax",
    }
    for kind, purpose in purposes.items():
        add = kinds.add_parser(kind, help=purpose, description=help, formatter_class=raw).add_argument
        for name, settings in {**SOURCE, **MEMBER}.items():
            add(name, **settings)
        add("--output", type=Path, required=True, metavar=f"FILE{SUFFIXES[kind]}", help="a new file")
        if kind == "words":
            add("--vocabulary", **number, help="number of most frequent words, with <unk> and <eos> (default: all)")
            continue
        add("--vocabulary", **number, required=True, help="number of tokens")
        add("--model-type", choices=["unigram", "bpe"], default="unigram", help="default: %(default)s")
        coverage = "fraction of the text whose characters become tokens; the rest is encoded as bytes (%(default)s)"
        add("--character-coverage", type=float, default=0.9995, metavar="PART", help=coverage)
        add("--sample-bytes", **number, default=50_000_000, help="bytes of text to train on (%(default)s)")


def train_tokenizer(args: argparse.Namespace) -> None:
    r"""Train a tokenizer on text: pieces of words (sentencepiece), or whole words.

        megasparse train-tokenizer sentencepiece --source book.txt --vocabulary 2000 --output tokenizers/book.model
        megasparse train-tokenizer sentencepiece --source books/ more.txt.gz --vocabulary 32000 \
            --model-type bpe --character-coverage 0.9999 --output tokenizers/books.model
        megasparse train-tokenizer words --source wikitext-103/wiki.train.tokens --output tokenizers/wikitext103.txt

    Sources are as in `megasparse prepare-data`; text that is not UTF-8 is an error. Use only the text of the training
    split. sentencepiece trains on a sample of whole lines, spread evenly over the source, and needs about 20 times its
    size in memory. Its tokenizers are lossless for any bytes. The same source and options give the same file.
    """
    from megasparse.data.corpora.corpus import LineSample
    from megasparse.data.corpora.source import Source
    from megasparse.data.tokenizers import build_tokenizer
    from megasparse.data.tokenizers.sentence_piece import train_sentencepiece
    from megasparse.data.tokenizers.simple import vocabulary_file
    from megasparse.evaluation.outputs import require_writable, write_output

    suffix = SUFFIXES[args.kind]
    if args.output.suffix != suffix:
        raise ConfigError("--output", f"{args.output} does not end in {suffix}", f"Name it *{suffix}")
    if args.kind == "words" and args.vocabulary is not None and args.vocabulary < 2:
        raise ConfigError("--vocabulary", f"{args.vocabulary} leaves no room for <unk> and <eos>", "Give 2 or more")
    if args.output.exists():
        raise ConfigError("--output", f"{args.output} already exists", "Remove it, or give another name")
    require_writable(args.output)
    source = Source.open(args.source, args.member, args.output.with_name(f".{args.output.name}.download"), "files")
    sample = LineSample(source, args.sample_bytes if args.kind == "sentencepiece" else 0)
    if args.kind == "sentencepiece":
        data = train_sentencepiece(sample.lines(), args.vocabulary, args.model_type, args.character_coverage)
    else:
        data = vocabulary_file(sample.all(), args.vocabulary)
    write_output(args.output, data)
    tokenizer = build_tokenizer(str(args.output))
    tokens = tokenizer.encode(sample.held_out)
    size, split = len(sample.held_out), "held-out" if sample.is_held_out else "training"
    rate = f"{size / max(1, len(tokens)):.3f} bytes per token on {size:,} {split} bytes"
    print(f"{args.output}: {tokenizer.vocabulary:,} tokens, {rate}")
    if tokenizer.lossless and tokenizer.decode(tokens) != sample.held_out:
        args.output.unlink()
        raise DataError(args.output, "decoding did not restore the text, so the file was removed", "Please report this")
    print("decoding restored the text" if tokenizer.lossless else "not lossless: unknown words become <unk>")
