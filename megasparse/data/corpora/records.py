"""Texts in records of files (objects of JSON lines, rows of tables): each record is a document.

All files are read once before anything is written, each by a worker process, for the lengths of the texts that are
taken and, with --deduplicate, digests of 128 bits. A text belongs to the split that contains its first byte, or to the
split of its file.
"""

import hashlib
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from tqdm import tqdm

from megasparse.data.corpora.corpus import (
    SPLIT,
    TOKENIZER,
    UNCHANGED,
    CorpusSettings,
    CorpusSplits,
    TextCorpus,
    as_bytes,
    option,
    require_full,
    split_sizes,
    text_pieces,
)
from megasparse.data.corpora.source import Part, Source, find_parts
from megasparse.data.index_file import Split, public
from megasparse.data.workers import Workers
from megasparse.errors import ConfigError, DataError, SourceError, positive
from megasparse.files import syntax_hint, write_file

MOST_DAMAGED = 0.01
"""Largest share of damaged records of a source."""
COPY = "copy of an earlier one"
DIGEST_BYTES = 16
LENGTH_BYTES = 8  # before each text in a source's digest, so that texts cut otherwise have another


class Unfit(NamedTuple):
    """Why a record is left out."""

    reason: str
    damaged: bool = False
    """False if it is excluded by an option."""
    hint: str = "check the source and its column"


class Invalid(Exception):
    """A record that cannot be used."""

    def __init__(self, reason: str, hint: str):
        self.unfit = Unfit(reason, damaged=True, hint=hint)


Records = Iterator[tuple[int, bytes | Unfit]]
"""(position of the record from 1 on, its text in UTF-8 or why it has none), in order."""
Texts = Callable[[Part, str], Records]
"""Maps (file, column) to the records."""
EMPTY = Unfit("empty")
NOT_UTF8 = Unfit("not UTF-8", damaged=True)
ZERO = Unfit("byte 0, which stands between documents", damaged=True)


ONE_PER_LINE = "Write one object per line, as jq -c . or for an array jq -c '.[]' does"


def json_hint(line: bytes) -> str:
    """Return what to do about a line that is not a JSON object."""
    try:
        text = line.decode("utf-8-sig").strip()
        if not text.startswith("["):  # an array may be large
            json.loads(text)
    except UnicodeDecodeError:
        return "The line is not UTF-8: convert the file, iconv -f latin1 -t utf-8"
    except json.JSONDecodeError as error:
        return syntax_hint(text, error.pos) or ONE_PER_LINE
    except (ValueError, RecursionError):  # a number or a nesting that is too large
        pass
    return ONE_PER_LINE


@dataclass(frozen=True)
class RecordReader:
    """Reads the texts of files that are fit; pickled to the worker processes."""

    parts: tuple[Part, ...]
    texts: Texts
    column: str
    least: int
    most: float
    zeros: bool
    """Accept the byte 0 in texts."""
    copies: bool
    """Take digests, to find copies."""

    def read(self, number: int) -> Records:
        """Yield (position from 1 on, text or why it is left out) of a file's records."""
        for position, text in self.texts(self.parts[number], self.column):
            yield position, text if isinstance(text, Unfit) else self._unfit(text) or text

    def _unfit(self, text: bytes) -> Unfit | None:
        if not text.strip():
            return EMPTY
        if not self.zeros and 0 in text:
            return ZERO
        if len(text) < self.least:
            return Unfit(f"shorter than {self.least} bytes")
        return Unfit(f"longer than {self.most} bytes") if len(text) > self.most else None

    def examine(self, number: bytes) -> "Examined":
        """Read a file for the first time."""
        lengths, digests, unfit, first, whole = list[int](), bytearray(), Counter[Unfit](), None, hashlib.sha256()
        for position, text in self.read(int(number)):
            if isinstance(text, Unfit):
                unfit[text] += 1
                first = first or ((position, text) if text.damaged else None)
                continue
            lengths.append(len(text))
            _add(whole, text)
            if self.copies:
                digests += hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()
        copies = np.frombuffer(bytes(digests), dtype=f"S{DIGEST_BYTES}")
        return Examined(np.asarray(lengths, dtype=np.int64), copies, unfit, first, whole.digest())


class Examined(NamedTuple):
    """The first reading of a file."""

    lengths: np.ndarray
    """Bytes of each fit text: int64 (texts,)."""
    copies: np.ndarray
    """Digest of each, if copies are looked for: S16 (texts,), or (0,)."""
    unfit: Counter[Unfit]
    first_damaged: tuple[int, Unfit] | None
    """Position of the first damaged record."""
    sha256: bytes
    """Digest of all fit texts and their lengths."""

    @property
    def records(self) -> int:
        return len(self.lengths) + self.unfit.total()


def _by_reason(files: Sequence[Examined]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for file in files:
        for unfit, count in file.unfit.items():
            counts[unfit.reason] += count
    return dict(sorted(counts.items()))


@dataclass(frozen=True, kw_only=True)
class RecordSource(Source):
    """Files of records, each read once."""

    reader: RecordReader
    examined: tuple[Examined, ...]
    names: tuple[str, ...]
    splits: tuple[np.ndarray, ...]
    """Number in `names` of each fit text of a file, -1 for a copy: int8 (texts,)."""
    facts: Mapping[str, Any]
    """Further entries of index.json."""

    def texts(self, number: int) -> Iterator[tuple[str, bytes]]:
        """Yield (split, text) of a file, without copies. Raises DataError if `examine` read other texts."""
        splits, whole = iter(self.splits[number].tolist()), hashlib.sha256()
        for _, text in self.reader.read(number):
            if not isinstance(text, Unfit):
                _add(whole, text)
                if (split := next(splits, -1)) >= 0:
                    yield self.names[split], text
        if whole.digest() != self.examined[number].sha256:
            raise SourceError(str(self.parts[number]), "it changed while it was read", UNCHANGED)

    def all_texts(self) -> Iterator[tuple[str, bytes]]:
        """Yield (split, text) of all files."""
        return chain.from_iterable(map(self.texts, range(len(self.parts))))

    def lengths(self) -> list[np.ndarray]:
        """Return the bytes of each text of each file, without copies."""
        return [file.lengths[splits >= 0] for file, splits in zip(self.examined, self.splits, strict=True)]

    def left_out(self) -> dict[str, int]:
        """Return the number of records left out, by reason."""
        counts = _by_reason(self.examined)
        if copies := sum(int((splits < 0).sum()) for splits in self.splits):
            counts[COPY] = copies
        return dict(sorted(counts.items()))

    def documents(self) -> dict[str, int]:
        """Return the number of documents by split."""
        counts = np.bincount(np.concatenate(self.splits) + 1, minlength=1 + len(self.names))[1:]
        return dict(zip(self.names, counts.tolist(), strict=True))


class RecordCorpus(TextCorpus):
    """Base of corpora of records; each text is a document with the tokenizer's separator after it."""

    DOCUMENTS = True
    SUFFIXES: ClassVar[Sequence[str]]
    """Suffixes of the files of a folder."""

    OPTIONS: ClassVar = {
        **TOKENIZER,
        **option("--min-bytes", type=positive, metavar="N", help="leave out texts of less"),
        **option("--max-bytes", type=positive, metavar="N", help="leave out texts of more"),
        **option("--deduplicate", action="store_true", help="leave out exact copies of earlier texts"),
    }

    @abstractmethod
    def texts(self, settings: CorpusSettings) -> Texts:
        """Return a function that reads the records of a file."""

    def open(
        self, locations: Sequence[str], member: str | None, downloads: Path, settings: CorpusSettings, workers: int
    ) -> RecordSource:
        parts = find_parts(locations, member, downloads, self.KIND, self.SUFFIXES)
        return self.examine(locations, parts, settings, workers, member=member)

    def examine(
        self,
        locations: Sequence[str],
        parts: Sequence[Part],
        settings: CorpusSettings,
        workers: int,
        *,
        member: str | None = None,
        file_splits: Sequence[str] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> RecordSource:
        """Read all files, in `workers` processes, and choose the texts that the settings ask for.

        file_splits: split of each file, if files belong to splits. Raises ConfigError for settings that do not fit;
        DataError for an unreadable file, more damaged records than MOST_DAMAGED, and if no text is left.
        """
        least, most = settings.get("min_bytes") or 1, settings.get("max_bytes") or float("inf")
        if least > most:
            raise ConfigError("--min-bytes", f"{least} is above --max-bytes {most}", "Give a smaller one")
        copies, column = bool(settings.get("deduplicate")), settings.get("column", "")
        reader = RecordReader(tuple(parts), self.texts(settings), column, least, most, not as_bytes(settings), copies)
        with Workers(reader.examine, min(workers, len(parts)), task_pieces=1) as pool:
            numbers = (str(number).encode() for number in range(len(parts)))
            files = list(tqdm(pool.map(numbers), "reading the source", len(parts), unit="file", disable=None))
        records = sum(file.records for file in files)
        damaged = sum(count for file in files for unfit, count in file.unfit.items() if unfit.damaged)
        if damaged > MOST_DAMAGED * records:
            part, first = next((part, file) for part, file in zip(parts, files, strict=True) if file.first_damaged)
            position, unfit = first.first_damaged or (0, EMPTY)
            share = f"{damaged:,} of {records:,} records are damaged"
            hint = f"Up to {MOST_DAMAGED:.0%} are left out: {unfit.hint}"
            raise DataError(part, f"{share}, the first is record {position} here: {unfit.reason}", hint)
        lengths = np.concatenate([file.lengths for file in files])
        is_copy = np.full(len(lengths), copies)
        if copies:  # of each content the first is none
            is_copy[np.unique(np.concatenate([file.copies for file in files]), return_index=True)[1]] = False
        lengths[is_copy] = 0
        total = int(lengths.sum())
        if not total:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in _by_reason(files).items()) or "no records"
            raise DataError(" ".join(locations), f"no text is left of it ({reasons})", "Check its content")
        texts_of_file = [len(file.lengths) for file in files]
        if file_splits:
            names = tuple(dict.fromkeys(file_splits))
            splits = np.repeat([names.index(name) for name in file_splits], texts_of_file)
        else:
            sizes = split_sizes(settings["split"] or SPLIT, total)
            names = tuple(sizes)
            splits = np.searchsorted(np.cumsum([*sizes.values()]), np.cumsum(lengths) - lengths, side="right")
        splits = np.where(is_copy, -1, splits).astype(np.int8)
        digest = hashlib.sha256(b"".join(file.sha256 for file in files))
        digest.update("".join(f"{name}\0" for name in file_splits).encode())
        return RecordSource(
            locations=tuple(locations),
            member=member,
            parts=tuple(parts),
            total_bytes=total,
            sha256=digest.hexdigest(),
            reader=reader,
            examined=tuple(files),
            names=names,
            splits=tuple(np.split(splits, np.cumsum(texts_of_file)[:-1])),
            facts=dict(facts or {}),
        )

    def about(self, source: Any, settings: CorpusSettings) -> dict[str, Any]:
        counts = source.documents()
        require_full(source, counts, f"{sum(counts.values())} documents")
        left_out = source.left_out()
        records = sum(counts.values()) + sum(left_out.values())
        return {**source.facts, "records": records, "documents": counts, "left_out": left_out}

    def splits(self, source: Any, settings: CorpusSettings) -> CorpusSplits:
        for name, group in groupby(source.all_texts(), key=itemgetter(0)):
            yield name, (text_pieces([text]) for _, text in group)


def _add(digest: "hashlib._Hash", text: bytes) -> None:
    digest.update(len(text).to_bytes(LENGTH_BYTES, "little"))
    digest.update(text)


QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def write_report(source: RecordSource, shards: Mapping[str, Split], path: Path) -> dict[str, Any]:
    """Write the report of a source and of its splits in shards, and return it. It depends on nothing but the two."""
    lengths, counts, splits = source.lengths(), source.documents(), {}
    for name, split in shards.items():
        size = {"documents": counts[name], "bytes": split.raw_bytes or 0, "tokens": split.tokens}
        splits[name] = {**size, "bytes_per_token": round(size["bytes"] / split.tokens, 4)}
    report = {
        "source": public(list(source.locations)),
        "revision": source.facts.get("revision"),
        "sha256": source.sha256,
        "files": len(source.parts),
        "records": sum(file.records for file in source.examined),
        "documents": sum(map(len, lengths)),
        "bytes": source.total_bytes,
        "left_out": source.left_out(),
        "lengths": _lengths(np.concatenate(lengths)),
        "splits": splits,
        "read": [
            {"file": part.name, "records": file.records, "documents": len(documents)}
            for part, file, documents in zip(source.parts, source.examined, lengths, strict=True)
        ],
    }
    write_file(path, json.dumps(report, indent=1, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
    return report


def _lengths(lengths: np.ndarray) -> dict[str, Any]:
    """Return statistics of the bytes of documents, int64 (documents,), each above 0.

    The i-th of `documents` and `bytes` are of the documents of edges[i] to below edges[i + 1] bytes, powers of two.
    """
    first, last = (int(length).bit_length() for length in (lengths.min(), lengths.max()))
    edges = [1 << power for power in range(first - 1, last + 1)]
    quantiles = np.quantile(lengths, QUANTILES, method="inverted_cdf").tolist()
    return {
        "mean": round(float(lengths.mean()), 2),
        "quantiles": {str(part): int(value) for part, value in zip(QUANTILES, quantiles, strict=True)},
        "edges": edges,
        "documents": np.histogram(lengths, edges)[0].tolist(),
        "bytes": np.histogram(lengths, edges, weights=lengths)[0].tolist(),
    }
