"""Records of two texts with special tokens and padding: pairs of segments for encoders, translations for
encoder–decoders.
"""

import argparse
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice, product, repeat
from typing import Any, ClassVar

import numpy as np

from megasparse.data.corpora.corpus import (
    NAMES,
    SAMPLE,
    SPLIT,
    SPLIT_OPTION,
    TOKENIZER,
    Corpus,
    CorpusSettings,
    CorpusSplits,
    Options,
    check_seed,
    lines,
    option,
    require_full,
    split_at,
    split_option,
    split_sizes,
    text_pieces,
)
from megasparse.data.corpora.source import PIECE, Part, Source
from megasparse.data.encoders import Encoded, PaddedEncoder
from megasparse.data.workers import grouped
from megasparse.errors import ConfigError, DataError, positive

ENDS = ("empty-lines", "files", "doc-tags")
"""Ends of documents within a file: empty lines (BookCorpus); none; the lines <doc ...> and </doc> of WikiExtractor."""
_TAG = re.compile(rb"</?doc\b[^>]*>\s*\Z")
_END = re.compile(r"""([.!?…]+)["'”’»)\]]*\s+(?=["'“‘«(\[]*(\w))""")
_NO_END = re.compile(r"\b([^\W\d_]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e)\Z")
SIDES = ("source", "target")
SHORTER = 0.1
"""Share of the records of random length."""


def length_option(name: str, tokens: int, of: str) -> Options:
    return option(name, type=positive, default=tokens, metavar="TOKENS", help=f"of {of} (default: %(default)s)")


class Pairs(Corpus):
    """Pairs of consecutive segments of text, for encoders that predict masked tokens and sentence order (ALBERT).

    A record of L tokens is [begin] A [separator] B [separator] and padding; A and B are consecutive runs of whole
    sentences of a document, with a random border. Every tenth record has a random shorter length. The number of
    sentences does not depend on their order: filling records until a sentence does not fit, or cutting segments as
    ALBERT does, reveals which segment came first (62 % of movie reviews' pairs of 128 tokens by sentence lengths).
    """

    EXAMPLE = "--source books/ --tokenizer tokenizers/bert.json --length 512 --output data/pairs"
    KIND = "files"
    SENTENCE_PAIRS = True

    ENDS_HELP = "end of a document within a file (default: %(default)s); the end of a file always ends one"
    OPTIONS: ClassVar = {
        **Corpus.OPTIONS,
        **TOKENIZER,
        **SPLIT_OPTION,
        **length_option("--length", 512, "a record"),
        **option("--documents", choices=ENDS, default=ENDS[0], help=ENDS_HELP),
        **option("--seed", type=int, default=0, help="of the cutting (default: %(default)s)"),
    }

    def encoder(self, settings: CorpusSettings) -> "PairEncoder":
        return PairEncoder(settings["tokenizer"], settings["length"], settings["seed"])

    def splits(self, source: Source, settings: CorpusSettings) -> CorpusSplits:
        """Return the splits; a document belongs to the split that contains its first byte."""
        source.require_text()
        sizes = split_sizes(settings["split"], source.total_bytes)

        def grouped_by_split() -> CorpusSplits:
            missing = dict.fromkeys(sizes)
            spans = text_documents(source, settings["documents"])
            for name, group in groupby(spans, key=lambda document: split_at(document[0], sizes)):
                del missing[name]
                yield name, [map(b"".join, grouped((text for _, text in group), PIECE))]
            if missing:
                raise DataError(source.name, f"no document begins in the part for {next(iter(missing))}", "Give more")

        return grouped_by_split()


class PairEncoder(PaddedEncoder):
    """Encode documents as records. Each sentence is read with a space before it."""

    def __init__(self, tokenizer: str, length: int, seed: int):
        super().__init__(tokenizer)
        self._arguments = (tokenizer, length, seed)
        self.record, self.seed = length, seed
        if length < 5:
            raise ConfigError("--length", f"{length} tokens hold no pair of segments", "Give 5 or more, such as 512")
        check_seed(seed)

    def encode(self, piece: bytes) -> Encoded:
        """Encode documents, each cut by draws of (seed, its text)."""
        begin, separator, _, _ = self.special
        records = []
        for document in documents(piece):
            sentences = [ids for sentence in document if len(ids := self.ids(f" {sentence}"))]
            for first, second in segments(sentences, self.record - 3, Words(self.seed, "\n".join(document))):
                records.append(self.padded([begin, first, separator, second, separator], self.record))
        return Encoded(self.joined(records), len(piece), len(piece.decode().split()))


class Words:
    """Random numbers by seed and text: raw Philox words, which numpy keeps stable across versions."""

    def __init__(self, seed: int, text: str):
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), dtype="<u4")
        self._philox = np.random.Philox(np.random.SeedSequence([seed, *digest.tolist()]))

    def below(self, n: int) -> int:
        return int(self._philox.random_raw()) * n >> 64


def segments(sentences: Sequence[np.ndarray], room: int, words: Words) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the segments A and B of a document's records, of up to `room` tokens together.

    sentences: tokens of each. Takes as many as fill the record at the document's mean length; if they do not fit, it
    drops the first or last, at random.
    """
    start, mean = 0, sum(map(len, sentences)) / max(1, len(sentences))
    while start < len(sentences):
        target = 2 + words.below(room - 1) if words.below(1000) < 1000 * SHORTER else room
        stop = start + max(2, round(target / mean))
        chunk = list(sentences[start:stop])
        while sum(map(len, chunk)) > room:
            chunk.pop(-words.below(2))
        if len(chunk) > 1:
            border = 1 + words.below(len(chunk) - 1)
            yield np.concatenate(chunk[:border]), np.concatenate(chunk[border:])
        start = stop


# Sentences of documents


def text_documents(source: Source, ends: str) -> Iterator[tuple[int, bytes]]:
    """Yield (byte of the source at which it starts, its lines that are not empty, and an empty one) of each document,
    longer ones in parts of up to 1 MiB. ends: one of ENDS.
    """
    position = 0
    for part in source.parts:
        text_lines: list[bytes] = []
        size, start = 0, -1
        part_lines = (line for piece in text_pieces(part.pieces()) for line in piece.splitlines(keepends=True))
        for line in chain(part_lines, [b""]):
            text = line.strip()
            border = not text if ends == "empty-lines" else ends == "doc-tags" and _TAG.match(text) is not None
            if text_lines and (border or not line or size + len(text) + 2 > PIECE):
                yield start, b"\n".join([*text_lines, b"", b""])
                text_lines, size = [], 0
            if border:
                start = -1
            elif text:
                start = position if start < 0 else start
                text_lines.append(text)
                size += len(text) + 1
            position += len(line)


def sentences(line: str) -> list[str]:
    """Cut a line into sentences, after . ! ? or …, closing quotes and brackets, and white space, unless a lower-case
    letter follows; not after a single letter or a common abbreviation.
    """
    cut, start = [], 0
    for end in _END.finditer(line):
        if end[2].islower() or (end[1] == "." and _NO_END.search(line, 0, end.start())):
            continue
        cut.append(line[start : end.end()].rstrip())
        start = end.end()
    return [*cut, line[start:].rstrip()] if line[start:].strip() else cut


def documents(text: bytes) -> Iterator[list[str]]:
    """Yield the sentences of each document of a piece's text."""
    for document in text.decode().split("\n\n"):
        if cut := [sentence for line in document.split("\n") for sentence in sentences(line)]:
            yield cut


class Files(argparse.Action):
    """Add files to the source, and the role of each to `roles`."""

    def __init__(self, option_strings: Sequence[str], dest: str, role: str, **options: Any):
        super().__init__(option_strings, dest, nargs="+", metavar="FILE", **options)
        self.role = role

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        namespace.source = [*(namespace.source or []), *values]
        namespace.roles = [*getattr(namespace, "roles", []), *[self.role] * len(values)]


class Parallel(Corpus):
    """Sentences and their translations, line by line in separate files, for encoder–decoders.

    A record is the source's tokens, [separator] and padding up to the source's length, then the target's, likewise.
    Pairs that are too long, or have an empty side, are left out: a cut target would teach to end too early. index.json
    lists the lines of each split (source.lines); a split's tokens divided by the record's are the pairs taken.
    """

    EXAMPLE = "--source train.en --target train.de --tokenizer tokenizers/ende.model --output data/ende"
    KIND = "files"

    SHARES = split_option(f"of the lines, from first to last, if only train is given (default: {SPLIT})")
    SOURCE_LENGTH = length_option("--source-length", 256, "the source in a record, its end included")
    TARGET_LENGTH = length_option("--target-length", 256, "the target in a record, its end included")
    OPTIONS = SAMPLE | TOKENIZER | SHARES | SOURCE_LENGTH | TARGET_LENGTH

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        for split, side in product(NAMES, SIDES):
            option = f"--{side}" if split == "train" else f"--{split}-{side}"
            help = f"{split}: files with one sentence per line; .gz, .bz2 and .xz are decompressed"
            required, role = split == "train", f"{split} {side}"
            parser.add_argument(option, dest="source", action=Files, required=required, role=role, help=help)

    def encoder(self, settings: CorpusSettings) -> "ParallelEncoder":
        return ParallelEncoder(settings["tokenizer"], settings["source_length"], settings["target_length"])

    def about(self, source: Source, settings: CorpusSettings) -> dict[str, Any]:
        source.require_text()
        files = _files(source, settings["roles"])
        lines_of: dict[str, int] = {}
        for split in NAMES:
            counts = {side: sum(1 for _ in _sentence_lines(files.get(f"{split} {side}", []))) for side in SIDES}
            if counts["source"] != counts["target"]:
                problem = f"{split} has {counts['source']:,} lines of the source and {counts['target']:,} of the target"
                raise DataError(source.name, problem, "Give files whose lines belong together")
            if counts["source"]:
                lines_of[split] = counts["source"]
        if len(lines_of) > 1 and settings["split"]:
            raise ConfigError("--split", f'"{settings["split"]}" conflicts with files of other splits', "Leave it out")
        if len(lines_of) == 1:
            total = lines_of["train"]
            lines_of = split_sizes(settings["split"] or SPLIT, total)
            require_full(source, lines_of, f"{total:,} lines")
        return {"lines": lines_of}

    def splits(self, source: Source, settings: CorpusSettings) -> CorpusSplits:
        counts = self.about(source, settings)["lines"]
        files = _files(source, settings["roles"])
        apart = len({role.split()[0] for role in files}) > 1
        pairs: Iterator[tuple[bytes, bytes]] = iter(())
        for split, count in counts.items():
            if apart or split == "train":
                pairs = zip(*(_sentence_lines(files[f"{split} {side}"]) for side in SIDES), strict=True)
            yield split, [_pair_pieces(islice(pairs, count))]


class ParallelEncoder(PaddedEncoder):
    def __init__(self, tokenizer: str, source_length: int, target_length: int):
        super().__init__(tokenizer)
        self._arguments = (tokenizer, source_length, target_length)
        self.lengths = (source_length, target_length)
        self.record = source_length + target_length

    def encode(self, piece: bytes) -> Encoded:
        """Encode pairs of texts. raw_bytes and words count the targets, which the decoder predicts."""
        texts = piece.decode().split("\n")
        records, raw_bytes, words = [], 0, 0
        for pair in zip(texts[:-1:2], texts[1::2], strict=True):
            ids = [self.ids(line) for line in pair]
            if all(0 < len(side) < length for side, length in zip(ids, self.lengths, strict=True)):
                for side, length in zip(ids, self.lengths, strict=True):
                    records.append(self.padded([side, self.special.separator], length))
                raw_bytes, words = raw_bytes + len(pair[1].encode()), words + len(pair[1].split())
        return Encoded(self.joined(records), raw_bytes, words)


def _files(source: Source, roles: Sequence[str]) -> dict[str, list[Part]]:
    if source.empty or len(source.parts) != len(roles):
        problem = f"{len(roles)} files are given, and {len(source.parts)} are found that are not empty"
        raise DataError(source.name, problem, "Give plain or compressed text files, no folders and no archives")
    return {
        role: [part for part, part_role in zip(source.parts, roles, strict=True) if part_role == role] for role in roles
    }


def _sentence_lines(parts: Iterable[Part]) -> Iterator[bytes]:
    """Without their ends and white space around. Raises DataError for a line that no sentence has."""
    for part in parts:
        last = 0
        for number, line in lines(part.pieces(), PIECE):
            if line is None:
                raise DataError(part, f"line {number} is longer than {PIECE:,} bytes", "Give a sentence a line")
            yield from repeat(b"", number - last - 1)
            if line:
                yield line.strip()
            last = number


def _pair_pieces(pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    held: list[bytes] = []
    size = 0
    for first, second in pairs:
        held.append(b"%b\n%b\n" % (first, second))
        size += len(held[-1])
        if size > PIECE // 2:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)
