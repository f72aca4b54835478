"""What a claim is: the paper's sentence, a rule of acceptance, budgets, and how it is measured, judged and drawn."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megasparse.callbacks import Progress

Budget = Literal["cpu", "gpu"]
Settings = dict[str, Any]
Numbers = dict[str, Any]
"""What one seed's measurement found; JSON."""


@dataclass(frozen=True)
class Trial:
    """One seed's measurement. folder: for files of its own. progress: called with what is being done."""

    settings: Settings
    seed: int
    folder: Path
    progress: Progress


@dataclass(frozen=True)
class Judgement:
    """Whether the rule is met, and the numbers that say so: a sentence, and rows of a table with its head first."""

    verified: bool
    sentence: str
    table: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True)
class Curve:
    """A line of a claim's figure: y over x, of one seed's numbers or of their mean."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Picture:
    """A claim's figure. log: the axes that are logarithmic, "x", "y" or both."""

    title: str
    x: str
    y: str
    curves: list[Curve]
    log: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, with all that its trial needs, written before the trial runs.

    says: what the paper says. rule: when it counts as verified, in words; `judge` computes it from all seeds' numbers.
    budgets: sizes of the trial on a CPU and on a GPU, "minutes" of a seed among them; a claim without one for a machine
    is not attempted there. measure: one seed's numbers, on the CPU or on the GPU that torch finds. missing: what a
    trial would take, where there is none.
    """

    name: str
    paper: str
    says: str
    rule: str
    budgets: dict[Budget, Settings]
    measure: Callable[[Trial], Numbers] | None = None
    judge: Callable[[Sequence[Numbers]], Judgement] | None = None
    draw: Callable[[Sequence[Numbers]], Picture] | None = None
    check: Callable[[Settings], None] | None = None
    seeds: Sequence[int] = (0, 1, 2)
    missing: str = ""


def mean_of(runs: Sequence[Numbers], key: str) -> list[float]:
    """The mean over the seeds of a list of numbers."""
    return [statistics.mean(column) for column in zip(*(run[key] for run in runs), strict=True)]
