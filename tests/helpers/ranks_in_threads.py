"""Several ranks as threads of one process, for agreements before and after computing."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megasparse.training.ranks import Ranks

LIMIT = 600.0
"""Seconds that a rank waits for the others."""


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    barrier: threading.Barrier = field(kw_only=True)
    texts: list[str] = field(kw_only=True)
    """Messages of each rank, shared by all."""

    def gather(self, value: Any, first_only: bool = False) -> list[Any]:
        self.texts[self.rank] = json.dumps(value)
        self.barrier.wait()
        values = [json.loads(text) for text in self.texts]
        self.barrier.wait()
        return values if self.rank == 0 or not first_only else []

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        of_each = [torch.tensor(value, dtype=values.dtype) for value in self.gather(values.tolist())]
        return values.copy_(torch.stack(of_each).sum(0))


def run_in_threads(work: Callable[[Ranks], Any], world_size: int = 2) -> list[Any]:
    """Run `work(ranks)` on every rank. Returns results or raised exceptions in the order of the ranks."""
    barrier, texts = threading.Barrier(world_size, timeout=LIMIT), [""] * world_size
    found: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadRanks(rank, world_size, barrier=barrier, texts=texts))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
        assert not thread.is_alive(), "a rank still waits for the others"
    return found
