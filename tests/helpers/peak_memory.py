"""Counts the bytes of every tensor torch allocates, to measure activation memory without a GPU and without noise."""

import multiprocessing
import tracemalloc
from collections.abc import Callable
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any

from megasparse.planning.passes import LiveBytes


class PeakMemory(LiveBytes):
    """LiveBytes, and inside the `with` also `largest`, the biggest single storage made there."""

    largest = 0

    def _made(self, size: int) -> None:
        super()._made(size)
        self.largest = max(self.largest, size)


def allocated_peak(profiled: Any) -> int:
    """Return the largest number of bytes allocated at a time since torch's profiler started."""
    records = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(records, key=lambda event: event.start_ns())))


def traced_peak(call: Callable[[], object]) -> int:
    """Bytes that `call` allocates at its peak. A forked process calls it, which has none of this one's other threads.

    An error of `call` fails the test: the process prints it."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_peak, args=(call, sender))
    child.start()
    child.join()
    assert child.exitcode == 0
    peak: int = receiver.recv()
    return peak


def _send_peak(call: Callable[[], object], sender: Connection) -> None:
    tracemalloc.start()
    call()
    sender.send(tracemalloc.get_traced_memory()[1])
