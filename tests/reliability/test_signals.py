"""A stop request to any process saves and exits with 0 at any moment; a failing run prints the cause."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.faults import Ended, Fault, Run, fault, is_complete, patience, running

GRACE = 3.0
"""Seconds for a step, a save and the end of the processes, from the moment at which the rank continues."""


def single_process(tmp_path: Path, data: Path) -> Run:
    """A run of one process without DeepSpeed, which starts sooner."""
    return Run(tmp_path / "alone", data, run={"engine": "torch"})


def ask(run: Run, name: str, to: str) -> float:
    """Send a signal to the "launcher", to "rank 1", or to "all"; the moment."""
    pids = [run.rank(int(to.split()[1]))] if to.startswith("rank") else [run.launcher]
    for pid in [*pids, run.rank(0), run.rank(1)] if to == "all" else pids:
        os.kill(pid, signal.Signals[name])
    return time.monotonic()


def stopped_well(run: Run, ended: Ended, step: int | None = None, code: int = 0) -> None:
    """It said so, its newest checkpoint is complete and of its last step, and nothing of it is left. code: 1 where
    torchrun was signalled, which reports that by a traceback."""
    assert ended.code == code, ended.said
    assert ("Traceback" in ended.said) == (code == 1)
    last = max(run.losses(), default=0)
    assert max(run.checkpoints(), default=0) == last and (step is None or last == step), ended.said
    for number in run.checkpoints():
        assert is_complete(run.directory / "checkpoints" / f"{number:08d}")
    assert not [path for path in (run.directory / "checkpoints").glob(".tmp-*")]
    assert run.leftovers() == []


@pytest.mark.slow
def test_an_interrupt_during_a_stalled_read_does_not_wait_for_it(data, tmp_path):
    run = single_process(tmp_path, data)
    with running(run):
        run.start(ranks=None, faults=[fault(r"read 21 data", "sleep 10000")])
        run.wait_for_fault(0)
        run.wait_for_step(5)
        time.sleep(0.3)
        ask(run, "SIGINT", "launcher")
        ended = run.wait()
    stopped_well(run, ended, step=5)


@pytest.mark.slow
def test_an_error_of_the_thread_that_reads_ahead_ends_the_run(data, tmp_path):
    run = single_process(tmp_path, data)
    with running(run):
        run.start(ranks=None, faults=[fault(r"read 21 data", "raise the disk is gone")])
        run.wait_for_fault(0)
        ended = run.wait()
    assert ended.code == 1
    assert "Injected: the disk is gone" in ended.said
    assert run.checkpoints() == [2, 4]


@pytest.mark.slow
def test_the_traceback_of_the_rank_that_failed_comes_first(data, tmp_path):
    run = Run(tmp_path / "run", data)
    with running(run):
        run.start(faults=[fault("forward 3$", "raise this rank is on fire", rank=1)])
        run.wait_for_fault(0)
        ended = run.wait()
    assert ended.code == 1
    rank, launcher = ended.said.split("Traceback")[1:]
    assert "Injected: this rank is on fire" in rank and "ChildFailedError" in launcher
    assert "connection to another rank was lost" not in ended.said.partition("Traceback")[0]
    assert run.leftovers() == [] and run.new_shared_memory() == set()
    # If both ranks end between two of its polls, torchrun may name the one that lost its peer.
    assert re.search(r"(?s)Root Cause.*rank +: [01] ", launcher), launcher


PLACES: dict[str, list[Fault]] = {
    "step": [fault("forward 5$", "sleep 1", rank=1)],
    "save": [fault(r"write \S*-00000004\S*/rank-", "sleep 1", rank=1)],
    "evaluation": [fault("evaluate", "sleep 1", rank=1)],
    "data": [fault(r"read 13 data", "sleep 20", rank=1)],
    "start": [fault("build", "sleep 1", rank=1)],
}


@pytest.mark.soak
@pytest.mark.parametrize("to", ["launcher", "rank 0", "rank 1", "all"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("place", PLACES)
def test_every_signal_everywhere(data, tmp_path, clean, place, name, to, figures):
    """Then the run is started again, and is the one that nobody stopped."""
    run = Run(tmp_path / "run", data, evaluation={"every": 5})
    with running(run):
        run.start(faults=PLACES[place])
        run.wait_for_fault(0)
        if place == "data":
            run.wait_for_step(5)  # of its eight ranks' reads a step is two
        asked = ask(run, name, to)
        ended = run.wait(since=asked)
        stopped_well(run, ended, code=0 if to.startswith("rank") else 1)
        grace = {"start": 10.0}.get(place, GRACE)  # a start goes on to its first step
        assert ended.seconds < 1 + grace * patience(), ended.said
        at = max(run.losses(), default=0)
        run.start("--stop-at", str(at + 3))
        assert run.wait().code == 0, run.said()
    figures(signals=1, longest_stop_seconds=ended.seconds)
    found = run.losses()
    assert found == {step: clean.losses()[step] for step in range(1, at + 4)}
