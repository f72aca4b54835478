"""Seconds that a device worked on some part of a step, however many pieces the part has."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """`with stopwatch.running(): ...` around each piece, or `start` and `stop`; then `seconds`, which waits for the
    device. On a GPU by its own clock, so that nothing waits before.
    """

    def __init__(self, device: torch.device):
        self._device, self._seconds = device, 0.0
        self._began: Any = None
        """An event of the GPU, or the time."""
        self._events: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Begin a piece. One that has begun already begins now instead."""
        if self._device.type == "cuda":
            self._began = self._began or torch.cuda.Event(enable_timing=True)
            self._began.record()
        else:
            self._began = time.perf_counter()

    def stop(self) -> None:
        """End the piece that has begun, if any."""
        began, self._began = self._began, None
        if began is None:
            return
        if self._device.type == "cuda":
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
            self._events.append((began, ended))
        else:
            self._seconds += time.perf_counter() - began

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is inside."""
        self.start()
        yield
        self.stop()

    def seconds(self) -> float:
        """Time measured since the last call."""
        for began, ended in self._events:
            ended.synchronize()
            self._seconds += began.elapsed_time(ended) / 1000
        result, self._seconds = self._seconds, 0.0
        self._events.clear()
        return result
