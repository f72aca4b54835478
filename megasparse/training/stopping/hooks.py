"""What training asks and tells of the world outside it: whether to stop, and that it is alive."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megasparse.config.schema import RunConfig
from megasparse.data.batches import never
from megasparse.training.checkpoints.checkpoint import silent
from megasparse.training.checkpoints.run_lock import run_lock
from megasparse.training.ranks import Ranks
from megasparse.training.reporting.rank_table import StepTimes
from megasparse.training.stopping.signals import StopSignals
from megasparse.training.stopping.watchdog import Watchdog


@dataclass(frozen=True)
class RunHooks:
    """The default is a run that nobody stops or watches."""

    stop_wanted: Callable[[], bool] = never
    """Whether this rank knows that the run should save and end. Ranks may learn of it at different steps."""
    progress: Callable[[str], None] = silent
    """Told what is done next, alike on all ranks: who hangs stands still, and has been told less than the others."""
    alive: Callable[[str], None] = silent
    """Told the same in work of which ranks may have different parts, such as files."""
    trace_wanted: Callable[[], bool] = never
    """Whether this rank was asked, since the last call, for a trace of its next steps."""


@contextmanager
def monitored(run: RunConfig, ranks: Ranks, signals: StopSignals) -> Iterator[RunHooks]:
    """The watch of a real run: a signal to any rank stops all, and a rank that hangs ends the run. Meanwhile
    `run.directory` is locked.

    Raises UserError, the same on every rank, where another run holds that folder.
    """

    def signalled() -> bool:
        return signals.wanted is not None

    launch = ranks.gather(uuid.uuid4().hex)[0]
    directory = Path(run.directory)
    beats = directory / "heartbeats"
    watchdog = Watchdog(beats, launch, ranks.rank, ranks.world_size, run.hang_timeout, signalled)
    with run_lock(directory, ranks), watchdog:
        stop_wanted = lambda: signalled() or watchdog.stop_elsewhere()  # noqa: E731
        yield RunHooks(stop_wanted, watchdog.progress, watchdog.alive, signals.trace_wanted)


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
    skipped: int
    """Sequences of the step that were skipped as damaged, over all ranks."""
    spent: list[StepTimes]
    """What each rank spent of the step before."""
    waited: float
    """Seconds that this rank waited here."""


def sync_step(
    ranks: Ranks, *, stop: bool, failed: bool, writing: bool, skipped: int, spent: StepTimes
) -> StepConsensus:
    """Every rank's own answers, shared in one small all-reduce, so that all of them do the same next."""
    began, width = time.perf_counter(), len(StepTimes._fields)
    answers = torch.zeros(4 + width * ranks.world_size, dtype=torch.float64)
    answers[:4] = torch.tensor([stop, failed, writing, skipped], dtype=torch.float64)
    answers[4 + width * ranks.rank :][:width] = torch.tensor(spent, dtype=torch.float64)
    shared = ranks.sum(answers.to(ranks.device)).cpu()
    stopping, failing, busy, missing = shared[:4].tolist()
    each = [StepTimes(*row) for row in shared[4:].view(-1, width).tolist()]
    return StepConsensus(stopping > 0, failing > 0, busy > 0, int(missing), each, time.perf_counter() - began)
