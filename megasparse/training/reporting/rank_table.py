"""What each rank spends of a step, side by side, for people who look for the slow one."""

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from megasparse.data.files import replacing
from megasparse.training.reporting.stragglers import STEPS, usual

EVERY = 100
"""Steps between tables, and at the end."""
SHOWN = 64
"""Ranks at most in the text, the slowest ones; the file has all."""


class StepTimes(NamedTuple):
    """Seconds of a rank's step."""

    data: float = 0.0
    """Waiting for data."""
    forward: float = 0.0
    """In the model's forward passes."""
    communication: float = 0.0
    """On, or waiting for, other ranks, where no computation hides it."""

    @property
    def own(self) -> float:
        """Seconds of work that wait for no other rank."""
        return self.data + self.forward


class RankTable:
    """Medians of the last 16 steps of every rank."""

    def __init__(self, world_size: int):
        self._past: list[deque[StepTimes]] = [deque(maxlen=STEPS) for _ in range(world_size)]

    def add(self, of_each_rank: Sequence[StepTimes]) -> None:
        for past, spent in zip(self._past, of_each_rank, strict=True):
            past.append(spent)

    def medians(self) -> list[StepTimes]:
        return [StepTimes(*(median(column) for column in zip(*past, strict=True))) for past in self._past]

    def write(self, file: Path, step: int) -> None:
        """Write the table as JSON, in place of the one before. Raises OSError."""
        rows = [{"rank": rank, **spent._asdict()} for rank, spent in enumerate(self.medians())]
        with replacing(file) as out:
            out.write(json.dumps({"step": step, "steps": len(self._past[0]), "ranks": rows}).encode() + b"\n")

    def text(self) -> str:
        """Return the table in Markdown, the slowest ranks first; seconds, and their own part against the usual one."""
        medians = self.medians()
        of_others = usual([spent.own for spent in medians])
        slowest = sorted(enumerate(medians), key=lambda row: -row[1].own)[:SHOWN]
        heading = "| rank | waiting for data | forward | exposed communication | own ratio |\n|---|---|---|---|---|\n"
        rows = []
        for rank, spent in slowest:
            seconds = " | ".join(f"{each:.3g}" for each in spent)
            rows.append(f"| {rank} | {seconds} | {spent.own / of_others[rank]:.2f} |")
        return heading + "\n".join(rows)
