"""Damaged samples that a tolerant run passes over: each is counted once and named once, and there is a limit."""

import sys
import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np

from megasparse.data.index import Index
from megasparse.data.index_file import Shard
from megasparse.data.members import Run
from megasparse.errors import DataError

MOST_LINES = 20


class DamagedSample(Exception):
    """Tokens were asked for of which some are damaged; `Damage` counts them already."""


class Damage:
    """Samples of one split that were found damaged so far. May be used from any thread.

    A sample once found damaged is never used again by this process. `limit`: part of the split's samples.
    """

    def __init__(self, index: Index, split: str, limit: float):
        self.limit = limit
        self._directory = index.directory
        self._split = split
        self._samples = index.split(split).samples
        self._lost: dict[str, np.ndarray] = {}
        self._counts: dict[str, Counter[str]] = {}
        self._lines = 0
        self._lock = threading.Lock()

    @property
    def samples(self) -> int:
        """Damaged samples so far."""
        with self._lock:
            return self._total()

    def summary(self) -> dict[str, dict[str, int]]:
        """Damaged samples so far, by shard and reason."""
        with self._lock:
            return {file: dict(counts) for file, counts in self._counts.items()}

    def overlaps(self, shard: Shard, first: int, stop: int) -> bool:
        """Whether a sample of first..stop of the shard is damaged."""
        lost = self._lost.get(shard.file)
        return lost is not None and bool(lost[first:stop].any())

    def is_lost(self, shard: Shard) -> bool:
        """Whether every sample of the shard is damaged."""
        with self._lock:
            return sum(self._counts.get(shard.file, Counter()).values()) == shard.samples

    def add(self, shard: Shard, runs: Sequence[Run]) -> None:
        """Count and name the samples of these runs that are not known yet.

        Raises DataError when there are more than the limit by now.
        """
        with self._lock:
            new = [run for run in runs if self._count(shard, run)]
            lines = [f"{self._directory / shard.file}: {run}; passed over" for run in new]
            shown = lines[: max(0, MOST_LINES - self._lines)]
            if self._lines < MOST_LINES < self._lines + len(lines):
                shown.append(f"{len(lines) - len(shown)} more; from here on damage is counted, not named")
            self._lines += len(lines)
            if shown:
                print(*(f"damaged data: {line}" for line in shown), sep="\n", file=sys.stderr, flush=True)
            if self._total() > self.limit * self._samples:
                raise self._too_much()

    def _count(self, shard: Shard, run: Run) -> int:
        lost = self._lost.setdefault(shard.file, np.zeros(shard.samples, dtype=bool))
        new = int(run.stop - run.first - lost[run.first : run.stop].sum())
        lost[run.first : run.stop] = True
        if new:
            self._counts.setdefault(shard.file, Counter())[run.reason] += new
        return new

    def _total(self) -> int:
        return sum(sum(counts.values()) for counts in self._counts.values())

    def _too_much(self) -> DataError:
        shards = [f"{file}: {sum(counts.values())}" for file, counts in self._counts.items()]
        some = ", ".join(shards[:5]) + (", …" if len(shards) > 5 else "")
        problem = (
            f'{self._total()} of the {self._samples} samples of "{self._split}" are damaged ({some}), '
            f"more than data.max_damaged = {self.limit} allows"
        )
        hint = "Prepare the data again with megasparse prepare-data (it rewrites what is damaged), or raise the limit"
        return DataError(self._directory, problem, hint)
