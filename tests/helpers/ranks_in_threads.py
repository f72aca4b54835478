"""Several ranks as threads of one process, for what ranks agree on before and after they compute."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megasparse.training.ranks import Ranks

LIMIT = 600.0
"""Seconds that a rank waits for the others."""


class Meeting:
    def __init__(self, world_size: int):
        self._barrier = threading.Barrier(world_size, timeout=LIMIT)
        self._texts = [""] * world_size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._texts[rank] = json.dumps(value)
        self._barrier.wait()
        values = [json.loads(text) for text in self._texts]
        self._barrier.wait()
        return values


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    meeting: Meeting | None = None

    def gather(self, value: Any) -> list[Any]:
        assert self.meeting is not None
        return self.meeting.gather(self.rank, value)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        of_each = [torch.tensor(value, dtype=values.dtype) for value in self.gather(values.tolist())]
        return values.copy_(torch.stack(of_each).sum(0))


def run_in_threads(work: Callable[[Ranks], Any], world_size: int = 2) -> list[Any]:
    """`work(ranks)` on every rank: what it returned, or the exception that it raised, in the order of the ranks."""
    meeting, found = Meeting(world_size), [None] * world_size

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadRanks(rank, world_size, meeting=meeting))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
        assert not thread.is_alive(), "a rank still waits for the others"
    return found
