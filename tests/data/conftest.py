import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megasparse.data.corpora.source import Source
from megasparse.data.index import Index
from megasparse.data.prepare import prepare


@pytest.fixture
def corpus() -> bytes:
    """7,013 bytes, every byte value among them, no two stretches alike."""
    return random.Random(0).randbytes(7013)


@pytest.fixture
def make_index(tmp_path: Path) -> Callable[..., Index]:
    """Prepares bytes as the corpus `text`, all in one split unless asked otherwise, in TMP/data."""

    def make(text: bytes, sample_bytes: int = 100, shard_bytes: int = 1000, split: str = "100,0,0") -> Index:
        (tmp_path / "source.txt").write_bytes(text)
        output = tmp_path / "data"
        prepare(
            "text",
            Source.open([str(tmp_path / "source.txt")], None, output / ".download"),
            output,
            options={"split": split},
            sample_bytes=sample_bytes,
            shard_bytes=shard_bytes,
            command="made by a test",
        )
        return Index.load(output)

    return make
