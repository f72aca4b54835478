"""Train a tokenizer on text: pieces of words by sentencepiece, or whole words.

    python tools/train_tokenizer.py sentencepiece --source book.txt --vocabulary 2000 --output tokenizers/book.model
    python tools/train_tokenizer.py sentencepiece --source books/ more.txt.gz --vocabulary 32000 \\
        --model-type bpe --character-coverage 0.9999 --output tokenizers/books.model
    python tools/train_tokenizer.py words --source wikitext-103/wiki.train.tokens --output tokenizers/wikitext103.txt
    python tools/prepare_data.py text --source books/ --tokenizer tokenizers/books.model --output data/books

A source is a file, a folder of files or an http(s) URL, decompressed as it is read, as of tools/prepare_data.py; text
that is not UTF-8 is refused. Give the text of the training split alone. sentencepiece learns from a sample of whole
lines, spread evenly over the source; it holds the sample in memory, and about 20 times as much besides while it trains.
Its settings are such that any bytes come back unchanged. The same source and options give the same file, which is
written whole or not at all.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megasparse.data.corpora.source import Source, positive
from megasparse.data.files import replacing
from megasparse.data.tokenizers import build_tokenizer
from megasparse.data.tokenizers.training import Sample, train_sentencepiece
from megasparse.data.tokenizers.words import vocabulary_file
from megasparse.errors import ConfigError, DataError, report_user_errors

SUFFIXES = {"sentencepiece": ".model", "words": ".txt"}


def build_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="train_tokenizer.py", description=__doc__, formatter_class=raw)
    kinds = parser.add_subparsers(dest="kind", required=True)
    parts = {
        "sentencepiece": kinds.add_parser(
            "sentencepiece", help="pieces of words, and all bytes", description=__doc__, formatter_class=raw
        ),
        "words": kinds.add_parser(
            "words", help="whole words, for adaptive softmax", description=__doc__, formatter_class=raw
        ),
    }
    for kind, part in parts.items():
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
        help="part of the text whose characters get a token each, others are told by bytes (default: %(default)s)",
    )
    pieces.add_argument(
        "--sample-bytes",
        type=positive,
        default=50_000_000,
        metavar="N",
        help="learn from so many (default: %(default)s)",
    )
    return parser


@report_user_errors
def main(arguments: Sequence[str] | None = None) -> None:
    given = build_parser().parse_args(arguments)
    suffix = SUFFIXES[given.kind]
    if given.output.suffix != suffix:
        raise ConfigError(
            "--output", f"{given.output} does not end in {suffix}", "By its ending it is known what it is"
        )
    if given.output.exists():
        raise ConfigError("--output", f"{given.output} exists already", "Remove it, or give another name")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    downloads = given.output.with_name(f".{given.output.name}.download")
    source = Source.open(given.source, given.member, downloads, "files")
    sample = Sample(source, given.sample_bytes if given.kind == "sentencepiece" else 0)
    if given.kind == "sentencepiece":
        data = train_sentencepiece(sample, given.vocabulary, given.model_type, given.character_coverage)
    else:
        data = count_words(sample, given.vocabulary)
    with replacing(given.output) as file:
        file.write(data)
    report(given.output, sample)


def count_words(sample: Sample, size: int | None) -> bytes:
    if size is not None and size < 2:
        raise ConfigError("--vocabulary", f"{size} leaves no room for <unk> and <eos>", "Give 2 or more")
    return vocabulary_file(sample.all(), size)


def report(path: Path, sample: Sample) -> None:
    """What the tokenizer makes of held-out text. Raises DataError where it does not come back."""
    tokenizer = build_tokenizer(str(path))
    tokens = tokenizer.encode(sample.held_out)
    size, where = len(sample.held_out), "held-out" if sample.is_held_out else "training"
    rate = f"{size / max(1, len(tokens)):.3f} bytes a token on {size:,} {where} bytes"
    print(f"{path}: {tokenizer.vocabulary:,} tokens, {rate}")
    if tokenizer.lossless and tokenizer.decode(tokens) != sample.held_out:
        path.unlink()
        raise DataError(path, "text did not come back from it, so it was removed", "Please report this")
    print("they came back unchanged" if tokenizer.lossless else "text does not come back unchanged from words")


if __name__ == "__main__":
    main()
