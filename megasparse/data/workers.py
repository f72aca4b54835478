"""Pieces to tokens in several processes, in the order of the pieces."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

from megasparse.data.corpora.cutting import grouped
from megasparse.data.encoding import Encoded, Encoder
from megasparse.errors import ConfigError, UserError

BATCH_BYTES, BATCH_PIECES = 1 << 20, 256  # of a task: small pieces go together


class Workers:
    """`encode` in `count` processes, which start with the first piece and end with the block; 1 is this process.

    In memory are 2 tasks a worker, about 1 MiB each. Raises what the encoder raises, at the piece's turn, and
    ConfigError naming --workers when a process was killed.
    """

    def __init__(self, encoder: Encoder, count: int):
        self._encoder, self._count = encoder, count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def encode(self, pieces: Iterable[bytes]) -> Iterator[Encoded]:
        if self._count == 1:
            yield from map(self._encoder.encode, pieces)
            return
        waiting: deque[Future[list[Encoded] | Refused]] = deque()
        for batch in grouped(pieces, BATCH_BYTES, BATCH_PIECES):
            waiting.append(self._submit(batch))
            if len(waiting) == 2 * self._count:
                yield from _result(waiting.popleft())
        while waiting:
            yield from _result(waiting.popleft())

    def _submit(self, batch: list[bytes]) -> "Future[list[Encoded] | Refused]":
        if self._pool is None:
            resource_tracker.ensure_running()  # its own start would undo the mask below
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._count, spawn, _start, (self._encoder,))
        # A process is started here, and inherits the mask: Ctrl-C is ours to deal with, not theirs.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._pool.submit(_encode, batch)
        except BrokenProcessPool:
            raise _killed() from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Refused(NamedTuple):
    """A UserError on its way here: those with several arguments cannot be unpickled."""

    kind: type[UserError]
    message: str
    entries: dict[str, Any]


def _result(task: "Future[list[Encoded] | Refused]") -> list[Encoded]:
    try:
        result = task.result()
    except BrokenProcessPool:
        raise _killed() from None
    if isinstance(result, Refused):
        error = result.kind.__new__(result.kind, result.message)
        error.__dict__.update(result.entries)
        raise error
    return result


def _killed() -> ConfigError:
    return ConfigError(
        "--workers", "a worker process was killed", "Run the command again, with fewer where memory ends"
    )


def _start(encoder: Encoder) -> None:
    """Initialise a worker: keep the encoder, and end when the preparation does, however that ends."""
    global _encoder
    _encoder = encoder
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _encode(batch: list[bytes]) -> list[Encoded] | Refused:
    try:
        return [_encoder.encode(piece) for piece in batch]
    except UserError as error:
        return Refused(type(error), str(error), vars(error))


_encoder: Encoder
