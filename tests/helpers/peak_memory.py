"""Counts the bytes of every tensor torch allocates, to measure activation memory without a GPU and without noise."""

from itertools import accumulate
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
