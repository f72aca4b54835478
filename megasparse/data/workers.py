"""A function of pieces in several processes, its results in the order of the pieces."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from typing import Any, Generic, TypeVar

from megasparse.errors import ConfigError

BATCH_BYTES, BATCH_PIECES = 1 << 20, 256  # of a task: small pieces go together

Result = TypeVar("Result")


class Workers(Generic[Result]):
    """`work` in `count` processes, which start with the first piece and end with the block; 1 is this process.

    Two tasks per worker are in memory, of about 1 MiB and at most `task_pieces` each. Raises the exceptions of `work`
    in order, and ConfigError naming --workers if a process was killed.
    """

    def __init__(self, work: Callable[[bytes], Result], count: int, task_pieces: int = BATCH_PIECES):
        self._work, self._count, self._task_pieces = work, count, task_pieces
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers[Result]":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def map(self, pieces: Iterable[bytes]) -> Iterator[Result]:
        if self._count == 1:
            yield from map(self._work, pieces)
            return
        waiting: deque[Future[list[Result]]] = deque()
        try:
            for batch in grouped(pieces, BATCH_BYTES, self._task_pieces):
                waiting.append(self._submit(batch))
                if len(waiting) == 2 * self._count:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool:
            raise ConfigError("--workers", "a worker process was killed", "Run the command again, with fewer") from None

    def _submit(self, batch: list[bytes]) -> "Future[list[Result]]":
        if self._pool is None:
            resource_tracker.ensure_running()  # its own start would undo the mask below
            self._pool = ProcessPoolExecutor(self._count, multiprocessing.get_context("spawn"), _start, (self._work,))
        # Starts a process, which inherits the mask: only this process handles Ctrl-C
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._pool.submit(_results, batch)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def grouped(pieces: Iterable[bytes], most_bytes: int, most_pieces: int | None = None) -> Iterator[list[bytes]]:
    """Yield consecutive pieces in groups of at most so many bytes (unless a piece is larger) and so many pieces."""
    group: list[bytes] = []
    size = 0
    for piece in pieces:
        if group and (size + len(piece) > most_bytes or len(group) == most_pieces):
            yield group
            group, size = [], 0
        group.append(piece)
        size += len(piece)
    if group:
        yield group


def _start(work: Callable[[bytes], Any]) -> None:
    """Initialise a worker, which ends when its parent process does."""
    global _work
    _work = work
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _results(batch: list[bytes]) -> list[Any]:
    return [_work(piece) for piece in batch]


_work: Callable[[bytes], Any]
