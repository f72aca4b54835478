"""Ranks that are slower than the others, step after step."""

from collections import deque
from collections.abc import Sequence
from statistics import median

STEPS = 16
RATIO = 1.5


class Stragglers:
    """Compares the seconds that each rank computes; the time it waits for others must not be among them."""

    worst_ratio = 1.0
    """The slowest rank's median time against that of the ranks (of two: of the other one); 1.0 where even."""

    def __init__(self, world_size: int):
        self._seconds: list[deque[float]] = [deque(maxlen=STEPS) for _ in range(world_size)]
        self._slow: set[int] = set()

    def add(self, seconds_of_each_rank: list[float]) -> list[str]:
        """One step. Returns a line for each rank that has become a straggler: its median of the last 16 steps is more
        than 1.5 times that of the ranks. It is reported again only when it has ended and come again."""
        for past, seconds in zip(self._seconds, seconds_of_each_rank, strict=True):
            past.append(seconds)
        if len(self._seconds) == 1 or len(self._seconds[0]) < STEPS:
            return []
        medians = [median(past) for past in self._seconds]
        of_others = usual(medians)
        ratios = [own / of for own, of in zip(medians, of_others, strict=True)]
        self.worst_ratio = max(ratios)
        before, self._slow = self._slow, {rank for rank, ratio in enumerate(ratios) if ratio > RATIO}
        return [
            f"rank {rank} is a straggler: {ratios[rank]:.2f} × the usual time of a step over the last {STEPS} "
            f"({medians[rank]:.3g} s against {of_others[rank]:.3g} s)"
            for rank in sorted(self._slow - before)
        ]


def usual(seconds: Sequence[float]) -> list[float]:
    """What each rank's seconds are to be measured by: the ranks' median; of two ranks the other one's."""
    found = [seconds[1], seconds[0]] if len(seconds) == 2 else [median(seconds)] * len(seconds)
    return [max(each, 1e-9) for each in found]
