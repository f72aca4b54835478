"""Cut a corpus into samples and write them as webdataset shards with an index.json.

    documents -> pieces (corpora/) -> tokens (workers.py) -> samples -> shards

A shard appears under its name when it is complete, index.json after the last shard. `.progress.json` lists the finished
shards and where each ended: the next run verifies them and resumes behind them. Another source, tokenizer or setting
than the folder's is an error. Finished shards are deleted if the source changed while it was read, or fills no split.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from tqdm import tqdm

from megasparse.data.corpora import CORPORA
from megasparse.data.corpora.corpus import ByteStream, CorpusSplits
from megasparse.data.corpora.source import Document, Source
from megasparse.data.encoders import Encoded, PieceEncoder
from megasparse.data.index_file import (
    INDEX_FILE,
    MOST_SAMPLES,
    IndexEntry,
    IndexFile,
    Shard,
    Split,
    TokenizerEntry,
    parse,
    save,
)
from megasparse.data.workers import Workers
from megasparse.errors import DataError, SourceError, UserError, one_line
from megasparse.files import LOCK_FILE, PARTIAL, file_sha256, locked, read_file, replacing, write_file

PROGRESS_FILE = ".progress.json"
Number = Annotated[int, Field(ge=0)]


class StreamPosition(IndexEntry):
    """Position between two tokens of a split. An item is a piece, or the token at the end of a document."""

    item: Number = 0
    """Items before the one that the next token is of."""
    token: Number = 0
    """Tokens of that one before it."""
    raw_bytes: Number = 0
    """Bytes of text of the items before."""
    words: Number = 0


class TokenStream(ByteStream):
    """`read(n)` over the tokens from a position on; the items before it are not encoded."""

    def __init__(
        self, documents: Iterable[Document], encoder: PieceEncoder, workers: Workers[Encoded], start: StreamPosition
    ):
        pieces = islice(_pieces(documents, encoder.end is not None), start.item, None)
        super().__init__(self._items(workers.map(pieces)))
        self.width = encoder.width
        self._before = self._after = start.model_copy(update={"token": 0})  # the current item, and behind it
        if start.token:
            self._fill()
            self._offset = start.token * self.width

    @property
    def position(self) -> StreamPosition:
        """Position of the next token."""
        if self._offset == len(self._piece):
            return self._after
        return self._before.model_copy(update={"token": self._offset // self.width})

    def _items(self, items: Iterable[Encoded]) -> Iterator[bytes]:
        for encoded in items:
            before = self._before = self._after
            raw_bytes, words = before.raw_bytes + encoded.raw_bytes, before.words + encoded.words
            self._after = StreamPosition(item=before.item + 1, raw_bytes=raw_bytes, words=words)
            yield encoded.tokens.tobytes()


def _pieces(documents: Iterable[Document], has_end: bool) -> Iterator[bytes]:
    """Yield the pieces that are not empty, and an empty one for the end of each document that has pieces."""
    for document in documents:
        has_pieces = False
        for piece in filter(None, document):
            has_pieces = has_end
            yield piece
        if has_pieces:
            yield b""


class PartialIndex(IndexFile):
    """The index of the finished shards; splits may be missing."""

    splits: dict[str, Split] = Field(default={})
    ends: dict[str, StreamPosition] = Field(default={})
    """Position behind each shard, by file name."""


def prepare(
    corpus: str,
    source: Source,
    output: Path,
    *,
    options: Mapping[str, Any],
    sample_bytes: int,
    shard_bytes: int,
    command: str,
    workers: int = 1,
) -> bool:
    """Write the shards and index.json of `corpus` to `output`. Return False if all exist already.

    options: of the corpus. sample_bytes: of a sample, rounded down to whole tokens or records. shard_bytes: of the
    samples of a shard, at most. Raises DataError if the source does not fit the corpus, the folder belongs to another
    source, or the disk is full.
    """
    settings = {"sample_bytes": sample_bytes, "shard_bytes": shard_bytes, **options}
    about = CORPORA[corpus].about(source, settings)
    streams = CORPORA[corpus].splits(source, settings)
    encoder = CORPORA[corpus].encoder(settings)
    plan = _plan(corpus, source, about, encoder, settings, command)
    with locked(output, "preparing data"), Workers(encoder.item, workers) as pool:
        return _write(plan, streams, encoder, pool, output)


def _plan(
    corpus: str, source: Source, about: dict[str, Any], encoder: PieceEncoder, settings: dict[str, Any], command: str
) -> PartialIndex:
    """Return the content of index.json without splits. Options that were not set are left out, as in old folders."""
    unit = encoder.width * (encoder.record or 1)
    size = max(1, settings["sample_bytes"] // unit) * unit
    stated = {key: value for key, value in settings.items() if not (value is None or value is False)}
    stated.pop("tokenizer", None)
    return PartialIndex(
        tokenizer=TokenizerEntry(name=encoder.name, sha256=encoder.sha256),
        corpus=corpus,
        command=command,
        source={
            "location": list(source.locations),
            "member": source.member,
            "bytes": source.total_bytes,
            "sha256": source.sha256,
            **({"layout": source.layout} if source.layout else {}),
            **about,
        },
        settings={**stated, "sample_bytes": size, **({"record": encoder.record} if encoder.record else {})},
    )


def _write(
    plan: PartialIndex, streams: CorpusSplits, encoder: PieceEncoder, workers: Workers[Encoded], output: Path
) -> bool:
    for leftover in output.glob(f".*{PARTIAL}"):  # of a preparation that was killed
        leftover.unlink()
    finished, ends = _finished(plan, output)
    copy = None
    if encoder.file:
        copy, content = output / f"tokenizer{encoder.file.suffix}", read_file(encoder.file)
        if not copy.exists() or read_file(copy) != content:
            write_file(copy, content)
    complete = (output / INDEX_FILE).exists()
    if complete and all(_is_whole(output, shard) for shard in finished.values()):
        return False
    splits: dict[str, Split] = {}
    total = plan.source["bytes"] or None
    try:
        with tqdm(desc="writing shards", total=total, unit="B", unit_scale=True, disable=None) as bar:

            def counted(piece: bytes) -> bytes:
                bar.update(len(piece))
                return piece

            for name, documents in streams:
                shards, start = list[Shard](), StreamPosition()
                while (file := _file(name, len(shards))) in ends and _is_whole(output, finished[file]):
                    shards.append(finished[file])
                    start = ends[file]
                stream = TokenStream((map(counted, document) for document in documents), encoder, workers, start)
                for shard in _shards(name, len(shards), stream, plan, finished, output):
                    shards.append(shard)
                    ends[shard.file] = stream.position
                    splits[name] = Split.of(shards)
                    if not complete:
                        save(plan.model_copy(update={"splits": splits, "ends": ends}), output / PROGRESS_FILE)
                if not shards:
                    location = " ".join(plan.source["location"])
                    raise SourceError(location, f"nothing of it is left for {name}", "Give more, or other settings")
                splits[name] = Split.of(shards, stream.position.raw_bytes or None, stream.position.words or None)
    except UserError as error:
        if not complete and (isinstance(error, SourceError) or not ends):  # the corrected command takes the same folder
            for name in (*ends, PROGRESS_FILE, LOCK_FILE):
                (output / name).unlink(missing_ok=True)
            if copy and encoder.file and not copy.samefile(encoder.file):
                copy.unlink()
            with suppress(OSError):  # a folder with downloads or other files in it stays
                output.rmdir()
        raise
    entries = {name: getattr(plan, name) for name in IndexFile.model_fields}
    save(IndexFile(**{**entries, "splits": splits}), output / INDEX_FILE)
    (output / PROGRESS_FILE).unlink(missing_ok=True)
    return True


def _file(split: str, number: int) -> str:
    return f"{split}-{number:06d}.tar"


def _shards(
    name: str, number: int, stream: TokenStream, plan: PartialIndex, finished: Mapping[str, Shard], output: Path
) -> Iterator[Shard]:
    """Yield the shards of a split from `number` on; those that are missing or damaged are written."""
    sample_bytes, shard_bytes = plan.settings["sample_bytes"], plan.settings["shard_bytes"]
    size = max(1, min(shard_bytes // sample_bytes, MOST_SAMPLES))
    while first := stream.read(sample_bytes):
        samples = chain([first], islice(iter(lambda: stream.read(sample_bytes), b""), size - 1))
        file = _file(name, number)
        if file in finished and _is_whole(output, finished[file]):
            for _ in samples:
                pass
            yield finished[file]
        else:
            yield _write_shard(output / file, enumerate(samples, number * size), stream.width)
        number += 1


def _write_shard(path: Path, samples: Iterable[tuple[int, bytes]], width: Literal[1, 2, 4]) -> Shard:
    """Write a tar file that depends on nothing but its samples: owner and time are fixed."""
    from webdataset.writer import TarWriter  # imports torch, for which a mistake in a source should not wait

    crc32: list[str] = []
    data_bytes = 0
    with replacing(path) as file:
        with TarWriter(file, user="megasparse", group="megasparse", mtime=0, encoder=False) as tar:
            for number, sample in samples:
                tar.write({"__key__": f"{number:09d}", "bin": sample})
                crc32.append(f"{zlib.crc32(sample):08x}")
                data_bytes += len(sample)
        file.flush()
        size, sha256 = file.tell(), file_sha256(file.fileno())
    return Shard(
        file=path.name,
        samples=len(crc32),
        tokens=data_bytes // width,
        width=width,
        bytes=size,
        sha256=sha256,
        crc32="".join(crc32),
    )


def _finished(plan: PartialIndex, output: Path) -> tuple[dict[str, Shard], dict[str, StreamPosition]]:
    """Return the shards that an earlier run finished, and the positions of their ends if known, by file name."""
    for name, kind in ((INDEX_FILE, IndexFile), (PROGRESS_FILE, PartialIndex)):
        if (output / name).exists():
            earlier = parse(output / name, kind)
            _refuse_another(plan, earlier, output)
            shards = {shard.file: shard for split in earlier.splits.values() for shard in split.shards}
            return shards, earlier.ends if isinstance(earlier, PartialIndex) else {}
    if stray := next(output.glob("*.tar"), None):
        raise DataError(output, f"{stray.name} is here, but no {INDEX_FILE}", "Choose another folder, or delete it")
    save(plan, output / PROGRESS_FILE)
    return {}, {}


def _refuse_another(plan: IndexFile, earlier: IndexFile, output: Path) -> None:
    def identity(file: IndexFile) -> dict[str, Any]:
        tokenizer = {"tokenizer": file.tokenizer.name, "tokenizer sha256": file.tokenizer.sha256}
        source = {f"source {key}": file.source.get(key) for key in ("bytes", "sha256", "layout")}
        return {"corpus": file.corpus, **tokenizer, **source, **file.settings}

    old, new = identity(earlier), identity(plan)
    missing = {"record"} - old.keys()  # in folders of earlier versions; the settings that determine it are compared
    differing = [key for key in {**old, **new} if key not in missing and old.get(key) != new.get(key)]
    if differing:
        changes = ", ".join(one_line(f"{key} {old.get(key)} (now {new.get(key)})") for key in differing[:9])
        raise DataError(output, f"this folder was prepared with another {changes}", "Choose another or delete it")


def _is_whole(output: Path, shard: Shard) -> bool:
    path = output / shard.file
    return path.is_file() and path.stat().st_size == shard.bytes and file_sha256(path) == shard.sha256
