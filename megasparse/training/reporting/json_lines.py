"""A file of JSON lines that outlives trouble with its storage: nothing is lost, nothing is torn, nothing is raised."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasparse.data.files import replacing


class JsonLines:
    """Appends lines. What the storage refuses waits in memory, in order, until it takes it.

    report: called once when the storage fails, and once when it works again. last_step: what an earlier process wrote
    of later steps is cut off first; None keeps all but a line that a crash cut short.
    """

    def __init__(self, path: Path, report: Callable[[str], None], last_step: int | None = None):
        self.path, self._report, self._last_step = path, report, last_step
        self._descriptor: int | None = None
        self._prepared, self._failing = False, False
        self._length: int | None = None
        """Bytes of whole lines."""
        self._waiting: list[bytes] = []
        self.flush()

    def append(self, values: dict[str, Any]) -> None:
        """Append one line, on its way to the disk when this returns; or later."""
        self._waiting.append(json.dumps(values).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write what waits, if the storage takes it."""
        try:
            self._write()
        except OSError as error:
            self._let_go()
            if not self._failing:
                self._report(
                    f"{self.path} cannot be written ({error.strerror}; {_free(self.path)}): its lines are kept in "
                    "memory and written when it works again. Training goes on"
                )
            self._failing = True
            return
        if self._failing:
            self._failing = False
            self._report(f"{self.path} can be written again: no line is missing")

    def close(self) -> None:
        """Write what waits, and report what could not be written."""
        self.flush()
        if self._waiting:
            self._report(f"{self.path}: its last {len(self._waiting)} lines could not be written and are lost")
        self._let_go()

    def _write(self) -> None:
        if not self._prepared:
            cut_lines(self.path, self._last_step)
            self._prepared = True
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            if self._length is None:
                self._length = os.fstat(self._descriptor).st_size
            os.ftruncate(self._descriptor, self._length)
        assert self._length is not None
        data = b"".join(self._waiting)
        written = 0
        while written < len(data):
            written += os.pwrite(self._descriptor, data[written:], self._length + written)
        self._length += len(data)
        self._waiting.clear()

    def _let_go(self) -> None:
        """Cut off a torn line, if the storage allows it (else when it works again), and close."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        with contextlib.suppress(OSError):
            if self._length is not None:
                os.ftruncate(descriptor, self._length)
        with contextlib.suppress(OSError):
            os.close(descriptor)


def cut_lines(path: Path, last_step: int | None) -> None:
    """Drop a line that a crash cut short, and the lines of steps after `last_step`. The file changes all at once."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _belongs(line, last_step)]
    if kept != lines:
        with replacing(path) as file:
            file.writelines(kept)


def _belongs(line: bytes, last_step: int | None) -> bool:
    try:
        return last_step is None or json.loads(line)["step"] <= last_step
    except (ValueError, KeyError, TypeError):
        return False


def _free(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path.parent).free:,} bytes are free"
    except OSError:
        return "free space unknown"
