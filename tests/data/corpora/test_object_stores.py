"""Sources and shards in object stores, by the one of fsspec's that is in memory."""

import json
import sys
from typing import Any

import fsspec
import pytest
import torch

from megasparse.data import urls
from megasparse.data.corpora import download as download_module
from megasparse.data.corpora.source import Source
from megasparse.data.index import Index
from megasparse.data.remote import ShardCache
from megasparse.errors import ConfigError, DataError
from tests.data.folders import everything, ramp, write_folder
from tests.helpers.refusals import refusal

FILES = {"a/1.txt": b"first\n" * 40_000, "a/2.txt": b"second\n", "a/b/3.txt": b"third\n", "a/.hidden": b"x"}


@pytest.fixture
def store(monkeypatch):
    """FILES in the bucket `bucket`."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    urls._store.cache_clear()
    monkeypatch.setitem(urls.STORES, "memory", urls.Store("The store", "fsspec", "fsspec"))
    for name, content in FILES.items():
        system.pipe_file(f"/bucket/{name}", content)
    yield system
    urls._store.cache_clear()


def opened(tmp_path: Any, *locations: str) -> Source:
    return Source.open(locations, None, tmp_path / ".download", "files")


@pytest.mark.parametrize(
    ("location", "names"),
    [
        ("memory://bucket/a", ["1.txt", "2.txt", "b/3.txt"]),
        ("memory://bucket/a/2.txt", ["2.txt"]),
        ("memory://bucket/a/*.txt", ["1.txt", "2.txt"]),
        ("memory://bucket/*/b/*", ["a/b/3.txt"]),
    ],
)
def test_a_file_a_folder_and_a_pattern(store, tmp_path, location, names):
    source = opened(tmp_path, location)
    assert [part.name for part in source.parts] == names
    whole = [f"a/{name}" if not name.startswith("a/") else name for name in names]
    assert b"".join(source.pieces()) == b"".join(FILES[name] for name in whole)


def test_what_came_is_kept_and_gone_on_from(store, tmp_path, monkeypatch):
    monkeypatch.setattr(download_module, "PIECE", 100_000)
    read, asked = urls._Object.read, []

    def failing(body: urls._Object, size: int, /) -> bytes:
        asked.append(body._file.tell())
        if len(asked) == 2:
            raise OSError("the line is cut")
        return read(body, size)

    monkeypatch.setattr(urls._Object, "read", failing)
    with pytest.raises(DataError, match=r"memory://bucket/a/1.txt: .*the line is cut \(100,000 bytes are here\)"):
        opened(tmp_path, "memory://bucket/a/1.txt")
    assert opened(tmp_path, "memory://bucket/a/1.txt").total_bytes == 240_000
    assert asked == [0, 100_000, 100_000, 200_000]
    asked.clear()
    opened(tmp_path, "memory://bucket/a/1.txt")
    assert not asked


def test_another_object_of_the_name_is_fetched_anew(store, tmp_path, monkeypatch):
    monkeypatch.setattr(download_module, "PIECE", 100_000)
    monkeypatch.setattr(download_module, "_check_room", lambda *_: None)
    append = download_module._append

    def cut(copy: Any, have: int, total: int, *rest: Any) -> None:
        append(copy, have, min(total, have + 100_000), *rest)
        raise OSError("cut")

    monkeypatch.setattr(download_module, "_append", cut)
    with pytest.raises(DataError, match="cut"):
        opened(tmp_path, "memory://bucket/a/1.txt")
    monkeypatch.setattr(download_module, "_append", append)
    store.pipe_file("/bucket/a/1.txt", b"other\n" * 40_000)
    assert b"".join(opened(tmp_path, "memory://bucket/a/1.txt").pieces()) == b"other\n" * 40_000


@pytest.mark.parametrize(
    ("location", "error", "message"),
    [
        ("memory://bucket/none", DataError, "this cannot be listed: The store answers"),
        ("memory://bucket/a/*.jsonl", DataError, "there are no such files"),
        ("hf://datasets/owner/name/data/*.parquet", ConfigError, "names no revision"),
        ("hf://datasets/owner/name@main/data/*.parquet", ConfigError, "with the 40 digits of a commit"),
        ("gs://user:secret@bucket/x", DataError, "has no user, password"),
        ("swift://bucket/x", ConfigError, '"swift" is not a kind of URL we read. Known here: http, https, s3, gs, az'),
    ],
)
def test_what_cannot_be_read_is_one_line(store, tmp_path, location, error, message):
    assert "secret" not in refusal(lambda: opened(tmp_path, location), error, message)


@pytest.mark.parametrize(("scheme", "library"), [("gs", "gcsfs"), ("az", "adlfs")])
def test_a_missing_library_is_one_error_with_its_command(tmp_path, monkeypatch, scheme, library):
    monkeypatch.setitem(sys.modules, library, None)
    urls._store.cache_clear()
    with pytest.raises(DataError, match=rf"{library} is not installed\. Run: pip install 'megasparse\[{scheme}\]'"):
        opened(tmp_path, f"{scheme}://bucket/a")


def test_shards_in_a_store_are_those_of_the_folder(store, tmp_path):
    folder = write_folder(tmp_path / "data", [ramp(3000, 7 * k, 11 + k) % 256 for k in range(3)])
    for path in folder.iterdir():
        store.pipe_file(f"/bucket/data/{path.name}", path.read_bytes())
    index = Index.load("memory://bucket/data", cache=ShardCache(tmp_path / "cache"))
    assert index.fingerprint == Index.load(folder).fingerprint
    assert torch.equal(everything(index), everything(Index.load(folder)))
    assert json.loads(store.cat("/bucket/data/index.json"))["splits"]
