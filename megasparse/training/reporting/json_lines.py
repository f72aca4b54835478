"""Files of JSON lines (metrics.jsonl, events.jsonl) that survive storage errors."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megasparse.files import open_file, open_regular, replacing


class JsonLines:
    """File of JSON lines. Lines that cannot be written wait in memory, in order, until the storage works again.

    Args:
        report: called once when the storage fails, and once when it works again.
        last_step: lines of later steps are cut off first; None keeps all but a line that a crash cut short.
    """

    def __init__(self, path: Path, report: Callable[[str], None], last_step: int | None = None):
        self.path, self._report, self._last_step = path, report, last_step
        self._length: int | None = None  # bytes of whole lines, unknown until the file was cut
        self._waiting: list[bytes] = []
        self._failing = False
        self.flush()

    def append(self, values: dict[str, Any]) -> None:
        """Append one line, now or when the storage works again."""
        self._waiting.append(json.dumps(values).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the waiting lines if the storage takes them."""
        problem = None
        try:
            self._write()
        except OSError as error:
            problem = error.strerror or str(error)
        if problem and not self._failing:
            free = "free space unknown"
            with suppress(OSError):
                free = f"{shutil.disk_usage(self.path.parent).free:,} bytes are free"
            waiting = "its lines are kept in memory and written when it works again"
            self._report(f"{self.path} cannot be written ({problem}; {free}): {waiting}")
        elif self._failing and not problem:
            self._report(f"{self.path} can be written again: no line is missing")
        self._failing = problem is not None

    def close(self) -> None:
        """Write the waiting lines, and report those that could not be written."""
        self.flush()
        if self._waiting:
            self._report(f"{self.path}: its last {len(self._waiting)} lines could not be written and are lost")

    def _write(self) -> None:
        if self._length is None:
            cut_lines(self.path, self._last_step)
        data, written = b"".join(self._waiting), 0
        # Created once: later it would be another file, such as one below the mount point of a folder unmounted since
        descriptor = open_regular(self.path, os.O_WRONLY | (os.O_CREAT if self._length is None else 0))
        try:
            size = os.fstat(descriptor).st_size
            self._length = size if self._length is None else self._length
            if size < self._length:
                raise OSError(errno.ESTALE, "it is shorter than what was written to it", str(self.path))
            os.ftruncate(descriptor, self._length)  # drops the rest of a failed write
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], self._length + written)
        except OSError:
            with suppress(OSError):  # or when it works again
                os.ftruncate(descriptor, self._length or 0)
            raise
        finally:
            with suppress(OSError):
                os.close(descriptor)
        self._length += len(data)
        self._waiting.clear()


def cut_lines(path: Path, last_step: int | None) -> None:
    """Drop a line that a crash cut short, and the lines of steps after `last_step`. The file changes all at once."""

    def valid(line: bytes) -> bool:
        try:
            return line.endswith(b"\n") and (last_step is None or json.loads(line)["step"] <= last_step)
        except (ValueError, KeyError, TypeError, RecursionError):
            return False

    if path.exists():
        with open_file(path) as file:
            lines = file.readlines()
        if not all(map(valid, lines)):
            with replacing(path) as out:
                out.writelines(filter(valid, lines))
