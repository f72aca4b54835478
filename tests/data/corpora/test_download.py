import hashlib
import json
import shutil
from types import SimpleNamespace

import pytest

from megasparse.data.corpora import download as download_module
from megasparse.data.corpora.download import download
from megasparse.errors import DataError

BODY = bytes(range(256)) * 12_000
FILE = "corpus.txt"


@pytest.fixture
def folder(tmp_path):
    """What the server has."""
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
    (folder / FILE).rename(folder / f"{FILE}?version=2")
    assert download(f"{url}?version=2", copies) != copy


def test_a_truncated_body_is_an_error_and_the_next_call_goes_on(server, url, copies):
    server.faults[FILE].extend(["cut", "cut"])
    for have in ("1,536,000", "2,304,000"):
        with pytest.raises(DataError, match=rf"ended after {have} of 3,072,000 bytes.*goes on from there"):
            download(url, copies)
        assert not list(copies.glob("*corpus.txt"))
    assert download(url, copies).read_bytes() == BODY
    assert [begin for _, begin in server.gets] == [None, "bytes=1536000-", "bytes=2304000-"]


@pytest.mark.parametrize("change", ["another file", "no ranges"])
def test_what_cannot_go_on_starts_over(server, url, copies, folder, change):
    server.faults[FILE].append("cut")
    with pytest.raises(DataError):
        download(url, copies)
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


def test_no_server(copies):
    with pytest.raises(DataError, match="the download did not complete"):
        download("http://127.0.0.1:9/x", copies)


def test_an_altered_copy_is_refused(url, copies):
    download(url, copies).write_bytes(BODY[:-1])
    with pytest.raises(DataError, match="altered"):
        download(url, copies)


def test_more_than_the_disk_holds_is_refused_before_it_comes(url, copies, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3_071_999))
    with pytest.raises(DataError, match=r"announces 3,072,000 bytes more, the disk has 3,071,999 free"):
        download(url, copies)
    assert not list(copies.iterdir())


@pytest.mark.parametrize(
    ("fault", "seconds", "problem"),
    [("drip", 1.0, r"less than 60,000 bytes came in 1\.0 s .*goes on from there"), ("stall", 0.3, "timed out")],
)
def test_a_server_that_hardly_sends_is_given_up_and_gone_on_with(
    server, url, copies, monkeypatch, fault, seconds, problem
):
    monkeypatch.setattr(download_module, "TIMEOUT_SECONDS", seconds)
    server.faults[FILE].append(fault)
    with pytest.raises(DataError, match=problem):
        download(url, copies)
    monkeypatch.undo()
    assert download(url, copies).read_bytes() == BODY
    assert server.gets[1][1] is not None  # a Range: what had come was kept


def test_a_small_file_may_come_slowly(server, url, copies, folder, monkeypatch):
    monkeypatch.setattr(download_module, "TIMEOUT_SECONDS", 1.0)
    (folder / FILE).write_bytes(b"abc")
    server.piece, server.pause = 1, 0.35
    assert download(url, copies).read_bytes() == b"abc"
