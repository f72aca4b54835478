"""Folders of shards made and read with only tarfile, numpy and json, to compare with; and damage to do to them."""

import hashlib
import io
import json
import tarfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megasparse.data.batches import Step, TrainingBatches
from megasparse.data.corpora.source import Kind, Source
from megasparse.data.index import Index
from megasparse.data.order import permutation
from megasparse.data.prepare import prepare
from megasparse.data.reader import EvaluationStream
from megasparse.data.tokenizers.simple import ByteTokenizer


def write_folder(
    folder: Path, shards: Sequence[np.ndarray], width: int = 1, sample_tokens: int = 100, **settings: Any
) -> Path:
    """A folder whose split `train` has these tokens, one array a shard."""
    folder.mkdir()
    entries: list[dict[str, Any]] = []
    for number, tokens in enumerate(shards):
        samples = [
            tokens[i : i + sample_tokens].astype(f"<u{width}").tobytes() for i in range(0, len(tokens), sample_tokens)
        ]
        path = folder / f"train-{number:06d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for i, sample in enumerate(samples):
                info = tarfile.TarInfo(f"{i:09d}.bin")
                info.size = len(sample)
                tar.addfile(info, io.BytesIO(sample))
        entries.append(
            {
                "file": path.name,
                "samples": len(samples),
                "tokens": len(tokens),
                **({"width": width} if width > 1 else {}),
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "crc32": "".join(f"{zlib.crc32(sample):08x}" for sample in samples),
            }
        )
    train = {key: sum(entry[key] for entry in entries) for key in ("tokens", "samples")} | {"shards": entries}
    index = {
        "tokenizer": {"name": ByteTokenizer.name, "sha256": ByteTokenizer.sha256},
        **{"corpus": "test", "command": "", "source": {}},
        "settings": {"sample_bytes": sample_tokens * width, **settings},
        "splits": {"train": train},
    }
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def largest(folder: Path) -> int:
    """Bytes of the largest shard."""
    return max(path.stat().st_size for path in folder.glob("*.tar"))


def read_folder(folder: Path) -> list[np.ndarray]:
    """The tokens of each shard of the split `train`: int64 (tokens,)."""
    index = json.loads((folder / "index.json").read_text())
    shards = []
    for entry in index["splits"]["train"]["shards"]:
        with tarfile.open(folder / entry["file"]) as tar:
            raw = b"".join(file.read() for member in tar if (file := tar.extractfile(member)))
        shards.append(np.frombuffer(raw, dtype=f"<u{entry.get('width', 1)}").astype(np.int64))
    return shards


def ramp(count: int, first: int, step: int = 1) -> np.ndarray:
    """Tokens first, first + step, ...: int64 (count,)."""
    return first + step * np.arange(count, dtype=np.int64)


def batches(folders: Sequence[tuple[Index, float]], **changes: Any) -> TrainingBatches:
    """Sequences of 30 tokens, 12 a step, on one rank."""
    settings: dict[str, Any] = {
        **{"sequence_length": 30, "seed": 3, "shuffle_shards": 2, "global_batch": 12, "micro_batch": 1},
        **{"rank": 0, "world_size": 1},
    }
    return TrainingBatches(folders, "train", **{**settings, **changes})


def take(data: TrainingBatches, steps: int) -> list[Step]:
    with data:
        return [next(data) for _ in range(steps)]


def rows(steps: Iterable[Step]) -> dict[int, list[int]]:
    """The tokens of each sample number."""
    return {
        number: row
        for step in steps
        for batch in step.micro_batches
        for number, row in zip(batch.samples.tolist(), batch.tokens.tolist(), strict=True)
    }


def everything(index: Index, split: str = "train") -> torch.Tensor:
    """All tokens of a split."""
    with closing(EvaluationStream(index, split)) as stream:
        return stream.read(0, stream.tokens)


def source_of(*places: Path, kind: Kind = "files", member: str | None = None) -> Source:
    return Source.open([str(place) for place in places], member, Path("/nowhere/.download"), kind)


def prepared(
    corpus: str, source: Source, output: Path, sample_bytes: int, shard_bytes: int, workers: int = 1, **options: Any
) -> Index:
    """The index of the shards that a corpus' source becomes in `output`, with its options."""
    sizes = {"sample_bytes": sample_bytes, "shard_bytes": shard_bytes}
    prepare(corpus, source, output, options=options, **sizes, command="a test", workers=workers)
    return Index.load(output)


def files(folder: Path) -> dict[str, bytes]:
    """Content of every file but the lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def counted_permutations(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[int]:
    """The length of each permutation that a module draws from now on."""
    sizes: list[int] = []
    monkeypatch.setattr(module, "permutation", lambda n, *key: sizes.append(n) or permutation(n, *key))
    return sizes


@contextmanager
def crashing(module: Any, name: str, at: int) -> Iterator[None]:
    """A block that ends in the at-th call of a function of a module, before it does anything."""
    function, calls = getattr(module, name), iter(range(1, 1000))

    def crash(*arguments: Any) -> Any:
        if next(calls) == at:
            raise KeyboardInterrupt
        return function(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, name, crash)
        yield


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def flip(*offsets: int) -> Callable[[bytes], bytes]:
    """Return a function that flips a bit of each of these bytes."""

    def flipped(tar: bytes) -> bytes:
        content = bytearray(tar)
        for offset in offsets:
            content[offset] ^= 1
        return bytes(content)

    return flipped


def do(harm: Callable[[bytes], bytes], path: Path) -> Path:
    """Change the content of a file."""
    path.write_bytes(harm(path.read_bytes()))
    return path


def edit(index: Index, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change index.json."""
    path = index.directory / "index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def without_crc32(index: Index) -> Index:
    """The index as earlier versions wrote it."""
    edit(index, lambda content: [shard.pop("crc32") for shard in content["splits"]["train"]["shards"]])
    return Index.load(index.directory)
