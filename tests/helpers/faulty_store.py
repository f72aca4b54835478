"""An object store in memory that fails on demand."""

import re
import threading
from collections.abc import Callable
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

OPERATIONS = ("put_file", "pipe_file", "ls", "cat_file", "rm_file", "_open")


class FaultyStore(MemoryFileSystem):
    """Each element of `faults` happens to the next operation that it is for, in turn: (regular expression that finds
    "OPERATION PATH", what happens). An exception is raised; "cut" keeps half of what is written, or read, and raises
    OSError; an event is waited for."""

    cachable = False
    store: dict[str, Any] = {}  # noqa: RUF012  (of this class, not of every MemoryFileSystem)
    pseudo_dirs = [""]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[tuple[str, Any]] = []
        self._inside = threading.local()
        self.before: Callable[[str], None] = lambda operation: None

    def put_file(self, lpath: str, rpath: str, callback: Any = None, **_: Any) -> None:
        with open(lpath, "rb") as file:
            content = file.read()
        self._happen("put_file", rpath, lambda part: self._keep(rpath, content[:part]), len(content))
        callback.relative_update(len(content))

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:  # type: ignore[override]
        self._happen("pipe_file", path, lambda part: self._keep(path, value[:part]), len(value))

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        return self._happen("ls", path, lambda _: MemoryFileSystem.ls(self, path, detail))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return bytes(self._happen("cat_file", path, lambda _: MemoryFileSystem.cat_file(self, path, start, end)))

    def rm_file(self, path: str) -> None:
        self._happen("rm_file", path, lambda _: MemoryFileSystem.rm_file(self, path))

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return self._happen("_open", path, lambda _: MemoryFileSystem._open(self, path, mode))

    def files(self) -> list[str]:
        return sorted(self.store)

    def _keep(self, path: str, content: bytes) -> None:
        with MemoryFileSystem._open(self, self._strip_protocol(path), "wb") as file:
            file.write(content)

    def _happen(self, name: str, path: str, work: Callable[[int | None], Any], size: int = 0) -> Any:
        operation = f"{name} {self._strip_protocol(path)}"
        if getattr(self._inside, "one", False):  # of another operation, for which the store has its own
            return work(None)
        self.before(operation)
        fault = None
        if self.faults and re.search(self.faults[0][0], operation):
            fault = self.faults.pop(0)[1]
        if isinstance(fault, Exception):
            raise fault
        if isinstance(fault, threading.Event):
            assert fault.wait(600)
        self._inside.one = True
        try:
            result = work(size // 2 if fault == "cut" else None)
        finally:
            self._inside.one = False
        if fault == "cut":
            raise OSError("connection reset")
        return result
