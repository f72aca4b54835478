"""A web server for a folder, on 127.0.0.1, that fails on demand: request by request, file by file.

It answers HEAD and GET with ranges, as a web server does and as S3 does for an object of a bucket."""

import contextlib
import re
import threading
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class ShardServer(ThreadingHTTPServer):
    """`faults[file]`: what becomes of each next GET of it, in turn; then it is answered as it should be.

    A number is that status; "stall" sends half and then nothing, "drip" a byte now and then; "cut" sends half and ends;
    "refuse" ends the connection without an answer; "wrong" sends other bytes, as many; "longer" more of them;
    "unannounced" states no length; "no ranges" begins at 0; "ftp" redirects to there."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.folder = folder
        self.faults: defaultdict[str, deque[int | str]] = defaultdict(deque)
        self.gets: list[tuple[str, str | None]] = []
        """File and Range of each GET."""
        self.pause = 0.0
        self.piece = 1 << 14
        """Seconds before each so many bytes of a right answer."""
        self.stopping = threading.Event()

    def shutdown(self) -> None:
        self.stopping.set()
        super().shutdown()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data"

    def count(self, suffix: str = ".tar") -> int:
        return sum(file.endswith(suffix) for file, _ in self.gets)


class Handler(BaseHTTPRequestHandler):
    server: ShardServer
    protocol_version = "HTTP/1.0"

    def do_HEAD(self) -> None:
        self._answer(body=False, fault=None)

    def do_GET(self) -> None:
        file = self.path.rsplit("/", 1)[-1]
        self.server.gets.append((file, self.headers.get("Range")))
        faults = self.server.faults[file]
        with contextlib.suppress(OSError):  # of a client that has gone
            self._answer(body=True, fault=faults.popleft() if faults else None)

    def _answer(self, body: bool, fault: int | str | None) -> None:
        path = self.server.folder / self.path.rsplit("/", 1)[-1]
        if fault == "refuse":
            return
        if isinstance(fault, int) or not path.is_file():
            self.send_response(*((fault, "no\x07") if isinstance(fault, int) else (404, None)))
            self.end_headers()
            return
        if fault == "ftp":
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1/x")
            self.end_headers()
            return
        content = path.read_bytes()
        if fault in ("wrong", "longer"):
            content = bytes(255 - byte for byte in content) + (b"more" * 100_000 if fault == "longer" else b"")
        start, stop = self._range(content, fault)
        if start >= len(content):
            self.send_response(416)
            self.end_headers()
            return
        content = content[start:stop]
        if fault != "unannounced":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self._send(content, fault)

    def _range(self, content: bytes, fault: int | str | None) -> tuple[int, int]:
        wanted, tag = re.match(r"bytes=(\d+)-(\d*)$", self.headers.get("Range", "")), f'"{zlib.crc32(content)}"'
        if not wanted or fault == "no ranges" or self.headers.get("If-Range", tag) != tag:
            self.send_response(200)
            start, stop = 0, len(content)
        else:
            start, stop = int(wanted[1]), min(int(wanted[2] or len(content)) + 1, len(content))
            if start < len(content):
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.send_header("ETag", tag)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        return start, stop

    def _send(self, content: bytes, fault: int | str | None) -> None:
        if fault in ("cut", "stall", "drip"):
            self.wfile.write(content[: len(content) // 2])
            for byte in content[len(content) // 2 :] if fault == "drip" else ():
                self.wfile.write(bytes([byte]))
                if self.server.stopping.wait(0.02):
                    return
            if fault == "stall":
                self.server.stopping.wait(30)
            return
        for begin in range(0, len(content), self.server.piece):
            self.server.stopping.wait(self.server.pause)
            self.wfile.write(content[begin : begin + self.server.piece])

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[ShardServer]:
    """Let a server answer in a thread of this process."""
    server = ShardServer(folder, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
