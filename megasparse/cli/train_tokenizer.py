"""Train a tokenizer on text: pieces of words by sentencepiece, or whole words.

    megasparse train-tokenizer sentencepiece --source book.txt --vocabulary 2000 --output tokenizers/book.model
    megasparse train-tokenizer sentencepiece --source books/ more.txt.gz --vocabulary 32000 \\
        --model-type bpe --character-coverage 0.9999 --output tokenizers/books.model
    megasparse train-tokenizer words --source wikitext-103/wiki.train.tokens --output tokenizers/wikitext103.txt
    megasparse prepare-data text --source books/ --tokenizer tokenizers/books.model --output data/books

A source is a file, a folder of files or an http(s) URL, decompressed as it is read, like those of `megasparse
prepare-data`; text that is not UTF-8 is refused. Give the text of the training split alone. sentencepiece learns from a
sample of whole lines, spread evenly over the source; it holds the sample in memory, and about 20 times as much besides
while it trains. Its settings are such that any bytes come back unchanged. The same source and options give the same
file, which is written whole or not at all.
"""

import argparse
from pathlib import Path

from megasparse.data.corpora.corpus import positive
from megasparse.data.corpora.source import Source
from megasparse.data.files import replacing
from megasparse.data.tokenizers import build_tokenizer
from megasparse.data.tokenizers.simple import vocabulary_file
from megasparse.data.tokenizers.training import Sample, train_sentencepiece
from megasparse.errors import ConfigError, DataError

SUFFIXES = {"sentencepiece": ".model", "words": ".txt"}
PURPOSES = {"sentencepiece": "pieces of words, and all bytes", "words": "whole words, for adaptive softmax"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True)
    parts = {}
    for kind, purpose in PURPOSES.items():
        part = parts[kind] = kinds.add_parser(
            kind, help=purpose, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        part.add_argument(
            "--source", nargs="+", required=True, metavar="PATH_OR_URL", help="what to read, in this order"
        )
        part.add_argument("--member", metavar="NAME", help="which file of a zip archive, where it has several")
        part.add_argument(
            "--output", type=Path, required=True, metavar=f"FILE{SUFFIXES[kind]}", help="the file to write, a new one"
        )
    parts["words"].add_argument(
        "--vocabulary",
        type=positive,
        metavar="N",
        help="the most frequent words alone, <unk> and <eos> among them (all)",
    )
    pieces = parts["sentencepiece"]
    pieces.add_argument("--vocabulary", type=positive, required=True, metavar="N", help="number of tokens")
    pieces.add_argument("--model-type", choices=["unigram", "bpe"], default="unigram", help="default: %(default)s")
    pieces.add_argument(
        "--character-coverage",
        type=float,
        default=0.9995,
        metavar="PART",
        help="part of the text whose characters get a token each, others become bytes (default: %(default)s)",
    )
    pieces.add_argument(
        "--sample-bytes",
        type=positive,
        default=50_000_000,
        metavar="N",
        help="learn from so many (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    suffix = SUFFIXES[args.kind]
    if args.output.suffix != suffix:
        raise ConfigError(
            "--output", f"{args.output} does not end in {suffix}", "The ending says what kind of tokenizer it is"
        )
    if args.output.exists():
        raise ConfigError("--output", f"{args.output} exists already", "Remove it, or give another name")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    downloads = args.output.with_name(f".{args.output.name}.download")
    source = Source.open(args.source, args.member, downloads, "files")
    sample = Sample(source, args.sample_bytes if args.kind == "sentencepiece" else 0)
    if args.kind == "sentencepiece":
        data = train_sentencepiece(sample, args.vocabulary, args.model_type, args.character_coverage)
    else:
        data = count_words(sample, args.vocabulary)
    with replacing(args.output) as file:
        file.write(data)
    report(args.output, sample)


def count_words(sample: Sample, size: int | None) -> bytes:
    if size is not None and size < 2:
        raise ConfigError("--vocabulary", f"{size} leaves no room for <unk> and <eos>", "Give 2 or more")
    return vocabulary_file(sample.all(), size)


def report(path: Path, sample: Sample) -> None:
    """Print how the tokenizer encodes held-out text. Raises DataError where decoding does not give that text back."""
    tokenizer = build_tokenizer(str(path))
    tokens = tokenizer.encode(sample.held_out)
    size, where = len(sample.held_out), "held-out" if sample.is_held_out else "training"
    rate = f"{size / max(1, len(tokens)):.3f} bytes a token on {size:,} {where} bytes"
    print(f"{path}: {tokenizer.vocabulary:,} tokens, {rate}")
    if tokenizer.lossless and tokenizer.decode(tokens) != sample.held_out:
        path.unlink()
        raise DataError(path, "text did not come back from it, so it was removed", "Please report this")
    print("they came back unchanged" if tokenizer.lossless else "text does not come back unchanged from words")
