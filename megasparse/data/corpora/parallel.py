"""Sentences and their translations, line by line in files of their own, for encoder–decoders.

A record is the source's tokens, [separator] and padding up to the source's length, then the target's tokens,
[separator] and padding up to the target's. A pair that does not fit is left out, for cut it would teach to end too
early; so is one with an empty side. index.json has the lines of each split (source.lines); a split's tokens divided by
the record are the pairs that were taken.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from megasparse.data.corpora.cutting import NAMES, PIECE, lines, split_sizes
from megasparse.data.corpora.padded import PaddedEncoder
from megasparse.data.corpora.source import Document, Part, Source, add_tokenizer_argument, positive
from megasparse.data.encoding import Encoded
from megasparse.errors import ConfigError, DataError

HELP = "lines and their translations, for encoder-decoders"
EXAMPLE = "--source train.en --target train.de --tokenizer tokenizers/ende.model --output data/ende"
FILES = True
DEFAULT_SPLIT = "90,5,5"


class Files(argparse.Action):
    """Adds files to those of the source, and to `roles` what each is."""

    def __init__(self, option_strings: Sequence[str], dest: str, role: str, **options: Any):
        super().__init__(option_strings, dest, nargs="+", metavar="FILE", **options)
        self.role = role

    def __call__(self, parser: argparse.ArgumentParser, given: argparse.Namespace, values: Any, *_: Any) -> None:
        given.source = [*(given.source or []), *values]
        given.roles = [*(given.roles or []), *[self.role] * len(values)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(roles=None, member=None)
    for split in NAMES:
        for side in ("source", "target"):
            parser.add_argument(
                f"--{side}" if split == "train" else f"--{split}-{side}",
                dest="source",
                action=Files,
                role=_role(split, side),
                required=split == "train",
                help=f"{split}: files with a sentence a line; .gz, .bz2 and .xz are decompressed",
            )
    parser.add_argument(
        "--split",
        metavar="TRAIN,VALIDATION,TEST",
        help=f"percent of the lines, from first to last, where no split but train has files (default: {DEFAULT_SPLIT})",
    )
    add_tokenizer_argument(parser)
    for side in ("source", "target"):
        parser.add_argument(
            f"--{side}-length",
            type=positive,
            default=256,
            metavar="TOKENS",
            help=f"of the {side} in a record, its end included (default: %(default)s)",
        )
    parser.add_argument(
        "--sample-bytes", type=positive, default=65_536, help="bytes in a sample (default: %(default)s)"
    )


def encoder(settings: Mapping[str, Any]) -> "ParallelEncoder":
    return ParallelEncoder(settings["tokenizer"], settings["source_length"], settings["target_length"])


def about(source: Source, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The lines of each split. Raises ConfigError and DataError for files that are no pairs, or no UTF-8."""
    source.require_text()
    files = _files(source, settings["roles"])
    found: dict[str, int] = {}
    for split in NAMES:
        counts = {side: sum(1 for _ in _lines(files.get(_role(split, side), []))) for side in ("source", "target")}
        if counts["source"] != counts["target"]:
            problem = f"{split} has {counts['source']:,} lines of the source and {counts['target']:,} of the target"
            raise DataError(source.name, problem, "Give files whose lines belong together")
        if counts["source"]:
            found[split] = counts["source"]
    if len(found) > 1 and settings["split"]:
        raise ConfigError("--split", f'"{settings["split"]}" is given beside files of other splits', "Leave it out")
    if len(found) == 1:
        found = split_sizes(settings["split"] or DEFAULT_SPLIT, found["train"])
        if empty := [name for name, count in found.items() if not count]:
            hint = "Give more lines, or another --split"
            raise DataError(source.name, f"its lines are too few to give {empty[0]} any", hint)
    return {"lines": found}


def splits(source: Source, settings: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Document]]]:
    """One document a split; a piece is lines of the source and of the target in turn."""
    counts = about(source, settings)["lines"]
    files = _files(source, settings["roles"])
    apart = len({role.split()[0] for role in files}) > 1
    pairs: Iterator[tuple[bytes, bytes]] = iter(())
    for split, count in counts.items():
        if apart or split == "train":
            sides = [_lines(files[_role(split, side)]) for side in ("source", "target")]
            pairs = zip(*sides, strict=True)
        yield split, [_pieces(islice(pairs, count))]


class ParallelEncoder(PaddedEncoder):
    """Lines of the source and of the target in turn to records."""

    def __init__(self, tokenizer: str, source_length: int, target_length: int):
        super().__init__(tokenizer)
        self._arguments = (tokenizer, source_length, target_length)
        self.lengths = (source_length, target_length)
        self.record = source_length + target_length

    def encode(self, piece: bytes) -> Encoded:
        """Encode pairs of texts. raw_bytes and words are those of the targets, which the decoder predicts."""
        texts = piece.decode().split("\n")
        records, raw_bytes, words = [], 0, 0
        for pair in zip(texts[:-1:2], texts[1::2], strict=True):
            ids = [self.ids(line) for line in pair]
            if all(0 < len(found) < length for found, length in zip(ids, self.lengths, strict=True)):
                for found, length in zip(ids, self.lengths, strict=True):
                    records.append(self.padded([found, self.special.separator], length))
                raw_bytes, words = raw_bytes + len(pair[1].encode()), words + len(pair[1].split())
        return Encoded(self.joined(records), raw_bytes, words)


def _role(split: str, side: str) -> str:
    return f"{split} {side}"


def _files(source: Source, roles: Sequence[str]) -> dict[str, list[Part]]:
    if source.empty or len(source.parts) != len(roles):
        problem = f"{len(roles)} files are given, and {len(source.parts)} are found that are not empty"
        raise DataError(source.name, problem, "Give plain or compressed text files, no folders and no archives")
    return {role: [part for part, own in zip(source.parts, roles, strict=True) if own == role] for role in roles}


def _lines(parts: Iterable[Part]) -> Iterator[bytes]:
    """Without their ends and white space around. Raises DataError for a line that no sentence has."""
    for part in parts:
        for line in lines(part.pieces(), PIECE):
            if line is None:
                raise DataError(str(part), f"a line is longer than {PIECE:,} bytes", "Give a sentence a line")
            yield line.strip()


def _pieces(pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Up to about 1 MiB of pairs at a time."""
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
