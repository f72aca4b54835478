"""An HTTP proxy before an S3 server, that fails on request: refused, slow, cut off in the middle, listing late."""

import http.client
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.helpers.shard_server import served

HOP = ("connection", "transfer-encoding", "content-length", "keep-alive")


class S3Proxy(ThreadingHTTPServer):
    """`fault(method, path)` says what becomes of a request: None, a status, "refuse" (the connection ends without an
    answer), "cut" (after half of the body that is sent, or of the answer), "slow" (`pause` seconds), "lost" (done, and
    the answer does not arrive). Listings are those before the last one where `late` is set.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int):
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = (host, port)
        self.fault: Callable[[str, str], int | str | None] = lambda method, path: None
        self.pause, self.late = 0.5, False
        self.faults: list[str] = []
        """What has happened: "FAULT METHOD PATH"."""
        self.listings: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: S3Proxy
    protocol_version = "HTTP/1.1"

    def _relay(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        fault = self.server.fault(self.command, self.path)
        if fault is not None:
            self.server.faults.append(f"{fault} {self.command} {self.path}")
        if fault == "refuse" or (fault == "cut" and size):
            self.rfile.read(size // 2)
            self.close_connection = True
            return
        body = self.rfile.read(size)
        if fault == "slow":
            time.sleep(self.server.pause)
        if isinstance(fault, int):
            self._answer(fault, [], b"")
            return
        status, headers, content = self._listing(self._forward(body))
        if fault in ("cut", "lost"):
            self.close_connection = True
            if fault == "cut":
                self._answer(status, headers, content, sent=len(content) // 2)
            return
        self._answer(status, headers, content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _relay

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self.server.target, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
        connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
        answer = connection.getresponse()
        content = answer.read()
        length = [("Content-Length", answer.headers.get("Content-Length", "0"))] if self.command == "HEAD" else []
        kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in HOP]
        connection.close()
        return answer.status, kept + length, content

    def _listing(self, answer: tuple[int, list[tuple[str, str]], bytes]) -> tuple[int, list[tuple[str, str]], bytes]:
        if self.command != "GET" or "list-type=2" not in self.path:
            return answer
        before = self.server.listings.get(self.path, answer)
        self.server.listings[self.path] = answer
        return before if self.server.late else answer

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, sent: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])

    def log_message(self, *arguments: object) -> None:
        pass


def proxied(host: str, port: int) -> AbstractContextManager[S3Proxy]:
    return served(S3Proxy(host, port))
