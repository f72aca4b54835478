"""Small files that one process rewrites in place and others read, on a disk that they share. No torch here."""

import errno
import json
import os
import zlib
from pathlib import Path
from typing import Any

SIZE = 4096
"""Bytes of such a file, always: rewriting it in place needs no space on a full disk."""


def write_beat(path: Path, fields: dict[str, Any]) -> None:
    """Put `fields` in the place of what the file had. Raises OSError where that fails."""
    text = json.dumps({"crc32": _checksum(fields), "heartbeat": fields}).ljust(SIZE - 1) + "\n"
    # Opened anew each time: on a network file system it is closing that shows it to the others.
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        if os.pwrite(file, text.encode(), 0) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)


def read_beat(path: Path) -> dict[str, Any] | None:
    """What the file has; None where it was being written. Raises OSError where it cannot be read."""
    try:
        record = json.loads(path.read_bytes())
        fields = record["heartbeat"]
        return dict(fields) if record["crc32"] == _checksum(fields) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields).encode())
