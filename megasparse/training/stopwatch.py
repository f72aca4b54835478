"""Seconds that a device worked on some part of a step, however many pieces the part has."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """`with stopwatch.running(): ...` around each piece, then `seconds`, which waits for the device."""

    def __init__(self, device: torch.device):
        self._device, self._seconds = device, 0.0
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is inside; on a GPU by its own clock, so that nothing waits here."""
        if self._device.type == "cuda":
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            yield
            ended.record()
            self._events.append((began, ended))
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def seconds(self) -> float:
        """Time measured since the last call."""
        for began, ended in self._events:
            ended.synchronize()
            self._seconds += began.elapsed_time(ended) / 1000
        result, self._seconds = self._seconds, 0.0
        self._events.clear()
        return result
