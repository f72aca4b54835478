"""Files mutated in bytes and in structure, and read in processes that may die, take too long or too much memory."""

import gzip
import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow

from megasparse.errors import UserError

MOST_SECONDS, MOST_BYTES = 5, 500_000_000
"""Seconds of a core, and bytes of memory, that reading any file may take."""
KEPT_FREE = 6 << 30  # address space that reading may map, files among it
NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 10**6, 10**9, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**18, 10**400, 1e308, -0.5, "", "x", "..", "../../x", "/etc/passwd", "\0"),
    *("\ud800", "é" * 100, "9" * 5000, [], {}, [[]], [None] * 1000, {"a": {"b": []}}, "float64", "F64", "nan"),
)


class Format(NamedTuple):
    """A kind of files: how intact ones are made in a folder, and how they are read there."""

    make: Callable[[Path], object]
    read: Callable[[Path], object]
    repair: Callable[[Path], object] = lambda _: None
    """Makes checksums right again, as who forges files does."""


class Case(NamedTuple):
    format: str
    number: int
    outcome: str
    """"read", "refused", or what must not be."""
    seconds: float
    bytes: int
    """Peak memory above the starting amount."""


def mutate(folder: Path, draw: random.Random, repair: Callable[[Path], object]) -> None:
    """Change one file of the folder, two in one of four cases, and mostly its structure where it has some."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    for _ in range(draw.choice((1, 1, 1, 2))):
        path = draw.choice(files)
        content = path.read_bytes()
        path.write_bytes(_structure(path, content, draw) if draw.random() < 0.6 else _bytes(content, draw))
    if draw.random() < 0.1:
        path = draw.choice(files)
        path.unlink()
        if draw.random() < 0.5:
            path.mkdir()
    if draw.random() < 0.7:
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # beyond repair
            repair(folder)


def _bytes(content: bytes, draw: random.Random) -> bytes:
    mutant = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5, 30))):
        place = draw.randrange(len(mutant) + 1)
        if draw.random() < 0.5:  # where headers and footers are
            place = min(len(mutant), draw.randrange(64)) if draw.random() < 0.6 else max(0, place - draw.randrange(64))
        length, kind = draw.choice((1, 2, 4, 8, 64, 512, 4096)), draw.randrange(7)
        if kind < 2 and mutant:
            mutant[min(place, len(mutant) - 1)] = draw.randrange(256)
        elif kind == 2:
            width = draw.choice((1, 2, 4, 8))
            mutant[place : place + width] = (draw.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 3:
            del mutant[place : place + length]
        elif kind == 4:
            mutant[place:place] = mutant[place : place + length]
        elif kind == 5:
            mutant[place : place + length] = draw.randbytes(length)
        elif draw.random() < 0.2:
            del mutant[place:]
    return bytes(mutant)


def _structure(path: Path, content: bytes, draw: random.Random) -> bytes:
    suffix = path.suffix
    try:
        if suffix == ".json":
            return _json(content, draw)
        if suffix == ".safetensors":
            size = int.from_bytes(content[:8], "little")
            head = _json(content[8 : 8 + size], draw)
            return len(head).to_bytes(8, "little") + head + content[8 + size :]
        if suffix == ".gz":
            return gzip.compress(_bytes(gzip.decompress(content), draw), 1)
        if suffix == ".zst":
            with pyarrow.CompressedInputStream(pyarrow.BufferReader(content), "zstd") as stream:
                return bytes(pyarrow.compress(_bytes(stream.read(), draw), "zstd", asbytes=True))
        if suffix == ".jsonl":
            lines = content.split(b"\n")
            number = draw.randrange(len(lines))
            lines[number] = _json(lines[number] or b"{}", draw)
            return b"\n".join(lines)
        if suffix == ".tar":
            return _tar(content, draw)
    except (ValueError, OSError, EOFError, RecursionError, zlib.error):
        pass  # it was mutated before
    return _bytes(content, draw)


def _json(content: bytes, draw: random.Random) -> bytes:
    """A value replaced, deleted or doubled, a key renamed; or brackets without end."""
    if draw.random() < 0.03:
        return b"[" * draw.choice((100, 10_000, 1_000_000))
    root = [json.loads(content)]
    at: Any = root
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = draw.choice(keys)
        if not (isinstance(at[key], dict | list) and at[key]) or (draw.random() < 0.1 and at is not root):
            break
        at = at[key]
    kind = draw.randrange(6)
    if kind == 0 and at is not root:
        del at[key]
    elif kind == 1 and isinstance(at, list):
        at.extend([at[key]] * draw.choice((1, 100)))
    elif kind == 1 and isinstance(at, dict):
        at[draw.choice(("x", "", "__class__", f"{key}x"))] = at.pop(key)
    elif kind == 2 and isinstance(at[key], int):
        at[key] = at[key] + draw.choice((-1, 1, 8)) if draw.random() < 0.5 else -at[key]
    else:
        at[key] = draw.choice(VALUES)
    return json.dumps(root[0]).encode()


def _tar(content: bytes, draw: random.Random) -> bytes:
    """A header's field changed, and its checksum right."""
    mutant = bytearray(content)
    place = 512 * draw.randrange(max(1, len(mutant) // 512))
    field, size = draw.choice(((0, 100), (100, 8), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155)))
    value = draw.choice(
        (b"77777777777", b"\x80" + b"\xff" * 11, b"0", b"../../x", b"x", b"2", b"S", draw.randbytes(12))
    )
    mutant[place + field : place + field + size] = value[:size].ljust(size, b"\0")
    head = mutant[place : place + 512]
    head[148:156] = b" " * 8
    mutant[place + 148 : place + 156] = b"%06o\0 " % sum(head)
    return bytes(mutant)


def fuzz(name: str, format: Format, seeds: Path, folder: Path, numbers: range) -> Iterator[Case]:
    """Read mutants of the files in `seeds`, which `format.make` made. Each is a function of its name and number."""
    following = numbers.start
    while following < numbers.stop:
        receiver, sender = os.pipe()
        if (child := os.fork()) == 0:
            os.close(receiver)
            try:
                _work(name, format, seeds, folder, range(following, numbers.stop), sender)
            finally:
                os._exit(1)  # never into what the parent is in the middle of
        os.close(sender)
        with os.fdopen(receiver, "rb") as lines:
            for line in lines:
                yield Case(name, *json.loads(line))
                following += 1
        status = os.waitpid(child, 0)[1]
        if following < numbers.stop:
            how = "took too long" if os.WTERMSIG(status) == signal.SIGPROF else f"died ({status})"
            yield Case(name, following, how, MOST_SECONDS, 0)
            following += 1


def _work(name: str, format: Format, seeds: Path, folder: Path, numbers: range, sender: int) -> None:
    """The child: a line for each case."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)
    used = _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (used + KEPT_FREE,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for number in numbers:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(seeds, folder, symlinks=True)
        mutate(folder, random.Random(f"{name} {number}"), format.repair)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
        before, start = _status("VmRSS"), _seconds()
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        signal.alarm(60)  # of what waits, and takes no time of a core
        try:
            format.read(folder)
            outcome = "read"
        except UserError as error:
            outcome = "refused" if "\n" not in str(error) else f"several lines: {str(error)[:300]!a}"
        except BaseException as error:
            outcome = f"{type(error).__name__}: {str(error)[:300]} {traceback.format_tb(sys.exc_info()[2])[-1][:300]}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        seconds, size = _seconds() - start, max(0, _status("VmHWM") - before)
        if size > MOST_BYTES:
            outcome = f"took {size:,} bytes; {outcome}"
        os.write(sender, json.dumps([number, outcome, round(seconds, 3), size]).encode() + b"\n")


def _seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) << 10
