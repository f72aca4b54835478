import random

import pytest

from megasparse.data import urls
from megasparse.data.index import Index
from megasparse.data.urls import ShardCache
from tests.data.folders import ramp, write_folder
from tests.helpers.shard_server import serving
from tests.helpers.trained import prepare_text


@pytest.fixture
def corpus():
    """7,013 bytes, every byte value among them, no two stretches alike."""
    return random.Random(0).randbytes(7013)


@pytest.fixture
def make_index(tmp_path):
    """Prepares bytes as the corpus `text`, all in one split unless asked otherwise, in TMP/data."""

    def make(text: bytes, sample_bytes: int = 100, shard_bytes: int = 1000, split: str = "100,0,0") -> Index:
        (tmp_path / "source.txt").write_bytes(text)
        return Index.load(
            prepare_text(tmp_path / "source.txt", tmp_path / "data", sample_bytes, shard_bytes, split=split)
        )

    return make


@pytest.fixture
def index(make_index, corpus):
    return make_index(corpus)


@pytest.fixture
def impatient(monkeypatch, request):
    """Short limits for a stalled server, otherwise long ones: a busy machine is not a stall."""
    faults = getattr(request.node, "callspec", None) and request.node.callspec.params.get("faults", ())
    monkeypatch.setattr(urls, "STALL_SECONDS", 0.4 if "stall" in (faults or ()) else 20.0)
    monkeypatch.setattr(urls, "LONGEST_PAUSE", 0.01)
    yield
    urls.store.cache_clear()


@pytest.fixture
def folder(tmp_path):
    """Six shards of about 9,000 bytes, no two alike."""
    return write_folder(tmp_path / "data", [ramp(3000 + 90 * k, 7 * k, 11 + k) % 256 for k in range(6)])


@pytest.fixture
def server(folder):
    with serving(folder) as server:
        yield server


@pytest.fixture
def cache(tmp_path):
    return ShardCache(tmp_path / "cache")


@pytest.fixture
def remote(server, cache):
    """Index of the server's shards."""
    return Index.load(server.url, cache=cache)
