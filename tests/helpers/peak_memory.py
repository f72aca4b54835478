"""Counts the bytes of every tensor torch allocates, to measure activation memory without a GPU and without noise."""

from megasparse.planning.live_bytes import LiveBytes


class PeakMemory(LiveBytes):
    """LiveBytes, and inside the `with` also `largest`, the biggest single storage made there."""

    largest = 0

    def _made(self, size: int) -> None:
        super()._made(size)
        self.largest = max(self.largest, size)
