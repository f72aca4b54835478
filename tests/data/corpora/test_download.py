"""Downloads of files, of objects in stores (by fsspec's store in memory), and of wheels."""

import hashlib
import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile

from megasparse.data import urls
from megasparse.data.corpora import download as download_module
from megasparse.data.corpora.download import download
from megasparse.data.corpora.source import Source
from megasparse.data.index import Index
from megasparse.data.urls import ShardCache
from megasparse.errors import ConfigError, DataError
from megasparse.files import locked, write_file
from tests.data.folders import everything, ramp, write_folder
from tests.helpers.cases import together
from tests.helpers.commands import refusal

BODY = bytes(range(256)) * 12_000
FILE = "corpus.txt"


@pytest.fixture
def folder(tmp_path):
    """Contents of the server."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / FILE).write_bytes(BODY)
    return tmp_path / "served"


@pytest.fixture
def url(server):
    return f"{server.url}/{FILE}"


@pytest.fixture
def copies(tmp_path):
    return tmp_path / "data" / ".download"


def test_downloads_once_and_records_the_sha256(server, url, copies, folder):
    copy = download(url, copies)
    assert copy.read_bytes() == BODY and copy.name.endswith("-corpus.txt")
    record = json.loads((copy.parent / f"{copy.name}.json").read_text())
    assert record == {"url": url, "bytes": len(BODY), "sha256": hashlib.sha256(BODY).hexdigest()}
    assert download(url, copies) == copy
    assert server.gets == [(FILE, None)]
    assert len(list(copy.parent.iterdir())) == 2
    (folder / FILE).rename(folder / f"{FILE}?Signature=secret")
    signed = download(f"{url}?Signature=secret", copies)
    assert signed != copy and signed.read_bytes() == BODY
    assert not [path for path in copies.iterdir() if b"secret" in path.name.encode() + path.read_bytes()]


def test_a_truncated_body_is_an_error_and_the_next_call_continues(server, url, copies):
    server.faults[FILE].extend(["cut", "cut"])
    for have in ("1,536,000", "2,304,000"):
        refusal(lambda: download(url, copies), match=rf"ended after {have} of 3,072,000 bytes.*goes on from there")
        assert not list(copies.glob("*corpus.txt"))
    assert download(url, copies).read_bytes() == BODY
    assert [begin for _, begin in server.gets] == [None, "bytes=1536000-", "bytes=2304000-"]


@pytest.mark.parametrize("change", ["another file", "no ranges"])
def test_a_download_that_cannot_continue_starts_over(server, url, copies, folder, change):
    server.faults[FILE].append("cut")
    refusal(lambda: download(url, copies))
    if change == "another file":
        (folder / FILE).write_bytes(BODY[::-1][:2_000_000])
    else:
        server.faults[FILE].append("no ranges")
    assert download(url, copies).read_bytes() == (folder / FILE).read_bytes()
    assert server.gets[1] == (FILE, "bytes=1536000-")


@pytest.mark.parametrize(("fault", "problem"), [(404, "404"), ("ftp", "ftp"), ("unannounced", "does not say how long")])
def test_refusals_name_the_url(server, url, copies, fault, problem):
    server.faults[FILE].append(fault)
    with pytest.raises(DataError, match=problem) as caught:
        download(url, copies)
    assert caught.value.path == url and not copies.parent.exists()


def test_an_altered_copy_is_rejected(url, copies):
    download(url, copies).write_bytes(BODY[:-1])
    refusal(lambda: download(url, copies), match="altered")


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b"3", b'{"url": 1}', b"[" * 99_999, b"\xff", b"9" * 5000])
def test_a_damaged_record_is_one_line(url, copies, record):
    copy = download(url, copies)
    (copies / f"{copy.name}.json").write_bytes(record)
    refusal(lambda: download(url, copies), match=r"\.txt\.json: this record is damaged\. Delete it and \w+-corpus")
    assert copy.read_bytes() == BODY


def test_a_copy_that_was_deleted_is_downloaded_again(url, copies, folder):
    download(url, copies).unlink()
    (folder / FILE).write_bytes(BODY[::-1])
    assert download(url, copies).read_bytes() == BODY[::-1]


def test_a_kill_while_a_changed_file_is_started_over_mixes_nothing(server, url, copies, folder, monkeypatch):
    server.faults[FILE].append("cut")
    refusal(lambda: download(url, copies), match="ended after")
    (folder / FILE).write_bytes(BODY[::-1])
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(download_module, "write_file", lambda path, text: sys.exit(write_file(path, text)))
        download(url, copies)
    assert download(url, copies).read_bytes() == BODY[::-1]


def test_one_process_at_a_time_downloads(url, copies):
    with locked(copies, "downloading"):
        refusal(lambda: Source.open([url], None, copies), match=r"another process is downloading here\. Wait")
    assert Source.open([url], None, copies).total_bytes == len(BODY)


@pytest.mark.parametrize("name", [".lock", "{}-corpus.txt.partial"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_planted_link_is_not_written_through(url, copies, tmp_path, name, link):
    (tmp_path / "target").write_text("precious")
    copies.mkdir(parents=True)
    link(tmp_path / "target", copies / name.format(hashlib.sha256(url.encode()).hexdigest()[:8]))
    refusal(lambda: Source.open([url], None, copies), match=r"this .*link.*, which is not written")
    assert (tmp_path / "target").read_text() == "precious"


def test_a_server_that_sends_nothing_is_given_up_and_gone_on_with(server, url, copies, monkeypatch):
    monkeypatch.setattr(urls, "STALL_SECONDS", 0.3)
    server.faults[FILE].append("stall")
    refusal(lambda: download(url, copies), match="timed out")
    monkeypatch.undo()
    assert download(url, copies).read_bytes() == BODY
    assert server.gets[1][1] is not None  # a Range: what had come was kept


OBJECTS = {"a/1.txt": b"first\n" * 40_000, "a/2.txt": b"second\n", "a/b/3.txt": b"third\n", "a/.hidden": b"x"}


@pytest.fixture
def store(monkeypatch):
    """OBJECTS in the bucket `bucket`."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    urls.store.cache_clear()
    monkeypatch.setitem(urls.STORES, "memory", ("fsspec", "fsspec"))
    for name, content in OBJECTS.items():
        system.pipe_file(f"/bucket/{name}", content)
    yield system
    urls.store.cache_clear()


def opened(tmp_path: Any, *locations: str) -> Source:
    return Source.open(locations, None, tmp_path / ".download", "files")


@together(
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
    assert b"".join(source.pieces()) == b"".join(OBJECTS[name] for name in whole)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_partial_download_is_kept_unless_the_object_changed(store, tmp_path, monkeypatch, replaced):
    monkeypatch.setattr(download_module, "PIECE", 100_000)
    read, asked = MemoryFile.read, []

    def failing(file: MemoryFile, size: int) -> bytes:
        asked.append(file.tell())
        if len(asked) == 2:
            raise OSError("the line is cut")
        return read(file, size)

    monkeypatch.setattr(MemoryFile, "read", failing, raising=False)
    with pytest.raises(DataError, match=r"memory://bucket/a/1.txt: .*the line is cut \(100,000 bytes are here\)"):
        opened(tmp_path, "memory://bucket/a/1.txt")
    if replaced:
        store.pipe_file("/bucket/a/1.txt", b"other\n" * 40_000)
    content = b"other\n" * 40_000 if replaced else OBJECTS["a/1.txt"]
    assert b"".join(opened(tmp_path, "memory://bucket/a/1.txt").pieces()) == content
    assert asked == [0, 100_000, *([0] if replaced else []), 100_000, 200_000]
    asked.clear()
    opened(tmp_path, "memory://bucket/a/1.txt")
    assert not asked


@pytest.mark.parametrize(
    ("location", "error", "message"),
    [
        ("memory://bucket/none", DataError, "this cannot be listed: it does not exist"),
        ("memory://bucket/a/*.jsonl", DataError, "there are no such files"),
        ("hf://datasets/owner/name/data/*.parquet", ConfigError, "names no revision"),
        ("hf://datasets/owner/name@main/data/*.parquet", ConfigError, "OWNER/NAME@COMMIT"),
        ("gs://user:secret@bucket/x", DataError, "those have no user, password"),
        ("https://user:secret@host/x?y=secret", DataError, "^https://host/x: .*those have no user, password"),
        ("http://127.0.0.1:9/x?X-Amz-Signature=secret", DataError, "^http://127.0.0.1:9/x: the download did"),
        ("http://[::1/x", DataError, "^http://: this is not a URL"),
        ("https://host:secret/x@y", DataError, "^https://host/x@y: this is not a URL"),
        ("file:///etc/passwd", DataError, "this is not a URL that is read here"),
        ("pipe://touch marker", DataError, "this is not a URL that is read here"),
        ("swift://bucket/x", DataError, "^swift://bucket/x: .*Known here: http, https, s3, gs, az"),
    ],
)
def test_an_unreadable_source_is_one_line(store, tmp_path, location, error, message):
    assert "secret" not in refusal(lambda: opened(tmp_path, location), error, message)


PINNED = f"hf://datasets/owner/name@{'0' * 40}/data/*.parquet"


@together(
    ("location", "library", "package"),
    [
        ("gs://bucket/a", "gcsfs", r"-e '\.\[gs\]'"),
        ("az://bucket/a", "adlfs", r"-e '\.\[az\]'"),
        ("s3://bucket/a", "s3fs", r"-e '\.\[remote\]'"),
        (PINNED, "huggingface_hub", "huggingface_hub"),
    ],
)
def test_a_missing_library_is_one_error_with_its_command(tmp_path, monkeypatch, location, library, package):
    monkeypatch.setitem(sys.modules, library, None)
    urls.store.cache_clear()
    refusal(lambda: opened(tmp_path, location), match=rf"{library} is not installed\. Run: pip install {package}")


def test_shards_in_a_store_equal_the_folder(store, tmp_path):
    folder = write_folder(tmp_path / "data", [ramp(3000, 7 * k, 11 + k) % 256 for k in range(3)])
    for path in folder.iterdir():
        store.pipe_file(f"/bucket/data/{path.name}", path.read_bytes())
    index = Index.load("memory://bucket/data", cache=ShardCache(tmp_path / "cache"))
    assert index.fingerprint == Index.load(folder).fingerprint
    assert torch.equal(everything(index), everything(Index.load(folder)))
    assert json.loads(store.cat("/bucket/data/index.json"))["splits"]


def test_a_wheel_is_downloaded_once_never_installed_and_checked(tmp_path, monkeypatch):
    commands, results = list[list[str]](), [(1, b""), (0, b""), (0, b"wheel")]

    def pip(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        code, content = results[len(commands)]
        commands.append(command)
        if content:
            (tmp_path / "a.whl").write_bytes(content)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(download_module, "WHEELS", tmp_path)
    monkeypatch.setattr(download_module.subprocess, "run", pip)
    sha256, options = hashlib.sha256(b"wheel").hexdigest(), ["--python-version", "3.11"]
    fetch = partial(download_module.fetch_wheel, "a==1", "a.whl", sha256, options)
    for _ in range(2):
        refusal(fetch, match=r"a\.whl: pip could not download a==1")
    for _ in range(2):
        assert fetch() == tmp_path / "a.whl"
    assert len(commands) == 3 and commands[2][2:4] == ["pip", "download"] and commands[2][-1] == "a==1"
    assert {"--no-deps", *options} <= set(commands[2])
    (tmp_path / "a.whl").write_bytes(b"other")
    refusal(fetch, match=r"a\.whl: its sha256 is .*Delete it")
