"""Cut a corpus into samples and write them as webdataset shards with an index.json.

A shard appears under its name only when it is whole, index.json after the last of them. `.progress.json` lists the
shards finished so far: run again, the preparation verifies and keeps those and writes the others, which come out the
same byte for byte. A folder that was begun from another source, or with other settings, is refused.
"""

import fcntl
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

from pydantic import Field
from tqdm import tqdm
from webdataset.writer import TarWriter

from megasparse.data.corpora import CORPORA
from megasparse.data.corpora.source import ByteStream, Source
from megasparse.data.files import file_sha256, partial_name, replacing
from megasparse.data.index_file import INDEX_FILE, MOST_SAMPLES, IndexFile, Shard, Split, TokenizerEntry, parse
from megasparse.data.members import verify_shard
from megasparse.data.tokenizers.byte import ByteTokenizer
from megasparse.errors import DataError

PROGRESS_FILE = ".progress.json"


class Progress(IndexFile):
    """The index of what is finished so far: there may be no split yet."""

    splits: dict[str, Split] = Field(default={})


def prepare(
    corpus: str,
    source: Source,
    output: Path,
    *,
    options: Mapping[str, Any],
    sample_bytes: int,
    shard_bytes: int,
    command: str,
) -> bool:
    """Write the shards and index.json of `corpus` to `output`. False when they were all there already.

    `options` are the corpus' own. A sample has `sample_bytes` bytes, the last of a split what is left; a shard as
    many samples as fit `shard_bytes`. Raises DataError when the source does not fit the corpus, the folder belongs to
    another source, or the disk is full.
    """
    plan = Progress(
        tokenizer=TokenizerEntry(name=ByteTokenizer.name, sha256=ByteTokenizer.sha256),
        corpus=corpus,
        command=command,
        source={
            "location": list(source.locations),
            "member": source.member,
            "bytes": source.total_bytes,
            "sha256": source.sha256,
        },
        settings={"sample_bytes": sample_bytes, "shard_bytes": shard_bytes, **options},
    )
    streams = CORPORA[corpus].splits(source, plan.settings)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with _lock(output):
            return _write(plan, streams, output)
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        raise DataError(output, problem, "Mend that and run the command again: finished shards are kept") from None


def _write(plan: Progress, streams: Iterable[tuple[str, Iterable[bytes]]], output: Path) -> bool:
    finished = _finished(plan, output)
    complete = (output / INDEX_FILE).exists()
    if complete and all(_is_whole(output, shard) for shard in finished.values()):
        return False
    sample_bytes, shard_bytes = plan.settings["sample_bytes"], plan.settings["shard_bytes"]
    size = max(1, min(shard_bytes // sample_bytes, MOST_SAMPLES))
    splits: dict[str, Split] = {}
    with tqdm(desc="writing shards", total=plan.source["bytes"], unit="B", unit_scale=True, disable=None) as bar:
        for name, pieces in streams:
            samples = _samples(pieces, sample_bytes, bar)
            shards: list[Shard] = []
            for number, shard_samples in enumerate(_groups(samples, size)):
                file = f"{name}-{number:06d}.tar"
                if file in finished and _is_whole(output, finished[file]):
                    shards.append(finished[file])
                else:
                    shards.append(_write_shard(output / file, shard_samples))
                splits[name] = _split(shards)
                if not complete:
                    _save(plan.model_copy(update={"splits": splits}), output / PROGRESS_FILE)
    _save(plan.model_copy(update={"splits": splits}), output / INDEX_FILE)
    (output / PROGRESS_FILE).unlink(missing_ok=True)
    return True


def _samples(pieces: Iterable[bytes], size: int, bar: "tqdm[NoReturn]") -> Iterator[tuple[int, bytes]]:
    """(number in the split, bytes) of each sample."""
    stream = ByteStream(pieces)
    number = 0
    while sample := stream.read(size):
        yield number, sample
        bar.update(len(sample))
        number += 1


def _groups(samples: Iterator[tuple[int, bytes]], size: int) -> Iterator[Iterator[tuple[int, bytes]]]:
    """Up to `size` samples at a time, without holding them; what a group's user leaves of it is passed over."""
    for first in samples:
        group = chain([first], islice(samples, size - 1))
        yield group
        for _ in group:
            pass


def _write_shard(path: Path, samples: Iterable[tuple[int, bytes]]) -> Shard:
    """A tar file that depends on nothing but its samples: owner and time are fixed."""
    crc32: list[str] = []
    tokens = 0
    with replacing(path) as file:
        with TarWriter(file, user="megasparse", group="megasparse", mtime=0, encoder=False) as tar:
            for number, sample in samples:
                tar.write({"__key__": f"{number:09d}", "bin": sample})
                crc32.append(f"{zlib.crc32(sample):08x}")
                tokens += len(sample)
        file.flush()
        size, sha256 = file.tell(), file_sha256(partial_name(path))
    return Shard(file=path.name, samples=len(crc32), tokens=tokens, bytes=size, sha256=sha256, crc32="".join(crc32))


def _split(shards: list[Shard]) -> Split:
    tokens, samples = sum(shard.tokens for shard in shards), sum(shard.samples for shard in shards)
    return Split(tokens=tokens, samples=samples, shards=tuple(shards))


def _save(content: IndexFile, path: Path) -> None:
    with replacing(path) as file:
        file.write(content.model_dump_json(indent=2).encode() + b"\n")


def _finished(plan: Progress, output: Path) -> dict[str, Shard]:
    """The shards that an earlier run finished, by file name. Raises DataError when they are of something else."""
    for name, kind in ((INDEX_FILE, IndexFile), (PROGRESS_FILE, Progress)):
        if (output / name).exists():
            earlier = parse(output / name, kind)
            _refuse_another(plan, earlier, output)
            return {shard.file: shard for split in earlier.splits.values() for shard in split.shards}
    stray = next(output.glob("*.tar"), None)
    if stray:
        problem = f"{stray.name} is here, but no {INDEX_FILE} says what it holds"
        raise DataError(output, problem, "Choose another --output, or delete what is here")
    _save(plan, output / PROGRESS_FILE)
    return {}


def _refuse_another(plan: IndexFile, earlier: IndexFile, output: Path) -> None:
    def identity(file: IndexFile) -> dict[str, Any]:
        source = {f"source {key}": file.source.get(key) for key in ("bytes", "sha256")}
        return {"corpus": file.corpus, "tokenizer": file.tokenizer.name, **source, **file.settings}

    old, new = identity(earlier), identity(plan)
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if differing:
        changes = ", ".join(f"{key} {old.get(key)} (now {new.get(key)})" for key in differing)
        problem = f"this folder was prepared with another {changes}"
        raise DataError(output, problem, "Choose another --output, or delete this folder")


def _is_whole(output: Path, shard: Shard) -> bool:
    try:
        verify_shard(output / shard.file, shard, output / shard.file, None)
    except DataError:
        return False
    return True


@contextmanager
def _lock(output: Path) -> Iterator[None]:
    """Keeps a second preparation out of the folder."""
    with (output / ".lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(output, "another preparation is writing here", "Wait for it to end") from None
        yield
