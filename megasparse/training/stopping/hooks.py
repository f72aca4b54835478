"""Hooks between a run and the world outside it: whether to stop, and signs of progress. How ranks agree on a stop."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megasparse.callbacks import Progress, never, silent
from megasparse.training.ranks import Ranks
from megasparse.training.reporting.rank_table import StepTimes


@dataclass(frozen=True)
class RunHooks:
    """Callbacks of a run. With the defaults nobody stops or watches it."""

    stop_wanted: Callable[[], bool] = never
    """Whether this rank knows that the run should save and end. Ranks may learn of it at different steps."""
    progress: Progress = silent
    """Called with what is done next, equally often on all ranks: a rank that hangs has called it less often."""
    alive: Progress = silent
    """Called with what is being done in work of which ranks may have different parts, such as files."""
    trace_wanted: Callable[[], bool] = never
    """Whether this rank was asked, since the last call, for a trace of its next steps."""


class StopWanted(Exception):
    """Raised on all ranks together, out of long work that may be left unfinished."""


def check_stop(hooks: RunHooks, ranks: Ranks, doing: str) -> None:
    """Between pieces of work that can be left out, such as evaluation. All ranks call it equally often.

    Raises StopWanted on every rank if any of them should stop.
    """
    hooks.progress(doing)
    if ranks.any(hooks.stop_wanted()):
        raise StopWanted


@dataclass(frozen=True)
class StepConsensus:
    """What all ranks know of each other before a step."""

    stop: bool
    """Some rank was asked to stop."""
    failed: bool
    """Some rank has no data for the step."""
    writing: bool
    """Some rank is still writing its part of a checkpoint."""
    spent: list[StepTimes]
    """What each rank spent of the step before."""
    waited: float
    """Seconds that this rank waited here."""


def sync_step(ranks: Ranks, *, stop: bool, failed: bool, writing: bool, spent: StepTimes) -> StepConsensus:
    """Every rank's own answers, shared in one small all-reduce, so that all of them do the same next."""
    began, width = time.perf_counter(), len(StepTimes._fields)
    answers = torch.zeros(3 + width * ranks.world_size, dtype=torch.float64)
    answers[:3] = torch.tensor([stop, failed, writing], dtype=torch.float64)
    answers[3 + width * ranks.rank :][:width] = torch.tensor(spent, dtype=torch.float64)
    shared = ranks.sum(answers.to(ranks.device)).cpu()
    stopping, failing, busy = shared[:3].tolist()
    each = [StepTimes(*row) for row in shared[3:].view(-1, width).tolist()]
    return StepConsensus(stopping > 0, failing > 0, busy > 0, each, time.perf_counter() - began)
