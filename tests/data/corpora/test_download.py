import contextlib
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from megasparse.data.corpora import download as download_module
from megasparse.data.corpora.download import download
from megasparse.errors import DataError

BODY = bytes(range(256)) * 12_000


class Server(HTTPServer):
    """Serves BODY with Range and ETag; its attributes say how it misbehaves."""

    body = BODY
    cut: int | None = None  # bytes after which the connection ends
    ranges = True
    etag = '"1"'
    claimed = 0  # bytes that it says there are more than there are
    pause = 0.0  # seconds between any two bytes
    requests: list[str | None]

    def url(self, path: str = "/corpus.txt") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.requests.append(wanted)
        if self.path == "/missing":
            self.send_error(404)
            return
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1/x")
            self.end_headers()
            return
        start = 0
        fresh = self.headers.get("If-Range") == self.server.etag
        if wanted and self.server.ranges and fresh and (match := re.match(r"bytes=(\d+)-$", wanted)):
            start = int(match[1])
            self.send_response(206)
            total = len(self.server.body)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        else:
            self.send_response(200)
        if self.path != "/unknown-length":
            self.send_header("Content-Length", str(len(self.server.body) - start + self.server.claimed))
        self.send_header("ETag", self.server.etag)
        self.end_headers()
        stop = None if self.server.cut is None else start + self.server.cut
        if not self.server.pause:
            self.wfile.write(self.server.body[start:stop])
            return
        with contextlib.suppress(OSError):
            for byte in self.server.body[start:stop]:
                self.wfile.write(bytes([byte]))
                time.sleep(self.server.pause)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server():
    server = Server(("127.0.0.1", 0), Handler)
    server.requests = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_downloads_once_and_records_the_sha256(server, tmp_path):
    copy = download(server.url(), tmp_path / "new")
    assert copy.read_bytes() == BODY and copy.name.endswith("-corpus.txt")
    record = json.loads((copy.parent / f"{copy.name}.json").read_text())
    assert record == {"url": server.url(), "bytes": len(BODY), "sha256": hashlib.sha256(BODY).hexdigest()}
    assert download(server.url(), tmp_path / "new") == copy
    assert server.requests == [None]
    assert len(list(copy.parent.iterdir())) == 2
    assert download(server.url("/corpus.txt?version=2"), tmp_path / "new") != copy


def test_a_truncated_body_is_an_error_and_the_next_call_goes_on(server, tmp_path):
    server.cut = 1_000_000
    for have in ("1,000,000", "2,000,000"):
        with pytest.raises(DataError, match=rf"ended after {have} of 3,072,000 bytes.*goes on from there"):
            download(server.url(), tmp_path)
        assert not list(tmp_path.glob("*corpus.txt"))
    server.cut = None
    assert download(server.url(), tmp_path).read_bytes() == BODY
    assert server.requests == [None, "bytes=1000000-", "bytes=2000000-"]


@pytest.mark.parametrize("change", ["another file", "no ranges"])
def test_what_cannot_go_on_starts_over(server, tmp_path, change):
    server.cut = 1_000_000
    with pytest.raises(DataError):
        download(server.url(), tmp_path)
    server.cut = None
    if change == "another file":
        server.body, server.etag = BODY[::-1][:2_000_000], '"2"'
    else:
        server.ranges = False
    assert download(server.url(), tmp_path).read_bytes() == server.body


@pytest.mark.parametrize(
    ("path", "problem"), [("/missing", "404"), ("/redirect", "ftp"), ("/unknown-length", "does not say how long")]
)
def test_refusals_name_the_url(server, tmp_path, path, problem):
    with pytest.raises(DataError, match=problem) as caught:
        download(server.url(path), tmp_path / "data" / ".download")
    assert caught.value.path == server.url(path) and not list(tmp_path.iterdir())


def test_no_server(tmp_path):
    with pytest.raises(DataError, match="the download did not complete"):
        download("http://127.0.0.1:9/x", tmp_path)


def test_D6_an_altered_copy_is_refused(server, tmp_path):
    copy = download(server.url(), tmp_path)
    copy.write_bytes(BODY[:-1])
    with pytest.raises(DataError, match="altered"):
        download(server.url(), tmp_path)


def test_D6_more_than_the_disk_holds_is_refused_before_it_comes(server, tmp_path):
    server.claimed = 1 << 60
    with pytest.raises(DataError, match=r"announces [\d,]+ bytes more, the disk has [\d,]+ free"):
        download(server.url(), tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 0


def test_D6_a_server_that_drips_is_given_up_and_gone_on_with(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download_module, "TIMEOUT_SECONDS", 1.0)
    server.pause = 0.01
    with pytest.raises(DataError, match=r"less than 60,000 bytes came in 1\.0 s .*goes on from there"):
        download(server.url(), tmp_path)
    server.pause = 0.0
    assert download(server.url(), tmp_path).read_bytes() == BODY
    assert server.requests[1] is not None  # a Range: what had come was kept


def test_D6_a_server_that_says_nothing_is_given_up(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download_module, "TIMEOUT_SECONDS", 0.3)
    server.pause = 1.0
    with pytest.raises(DataError, match="timed out"):
        download(server.url(), tmp_path)


def test_D6_a_small_file_may_come_slowly(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download_module, "TIMEOUT_SECONDS", 1.0)
    server.body, server.pause = b"abc", 0.6
    assert download(server.url(), tmp_path).read_bytes() == b"abc"
