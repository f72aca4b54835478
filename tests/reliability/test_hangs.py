"""A hanging rank ends the run in time and is named; a slow rank is only named."""

import time

import pytest

from megasparse.errors import HANG
from tests.helpers.faults import Fault, Run, fault, running

TIMEOUT = 10.0
HANGS: dict[str, Fault] = {
    "stopped": fault("forward 6$", "stop", rank=1),
    "reading": fault("read 15 data", "sleep 10000", rank=1),
    "lock": fault("forward 6$", "gil", rank=1),  # of the interpreter: no thread of Python runs any more
    "saving": fault(r"write \S*-00000006\S*/rank-", "sleep 10000", rank=1),
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.slow if how == "stopped" else pytest.mark.soak) for how in HANGS]
)
def test_a_rank_that_hangs_is_named_in_time(data, tmp_path, how, figures):
    run = Run(tmp_path / "run", data, run={"hang_timeout": TIMEOUT})
    with running(run):
        run.start(faults=[HANGS[how]])
        note = run.wait_for_fault(0)
        if how == "reading":
            run.wait_for_step(6)  # the thread is ahead of the step that will lack its data
        began = time.time()
        run.wait_until(lambda: "HANG:" in run.said())
        detected = time.time() - began
        ended = run.wait()
    figures(hangs=1, longest_detection_seconds=detected)
    assert note["rank"] == 1
    assert TIMEOUT - 1 < detected < TIMEOUT + 2
    assert ended.code == 1 and f"exitcode  : {HANG} (" in ended.said
    verdict = next(line for line in ended.said.splitlines() if "HANG:" in line)
    culprits = verdict.partition("HANG: ")[2].partition("Rank 0, at")[0]
    assert "rank 1 on" in culprits and "rank 0 on" not in culprits, verdict
    assert ("T (stopped)" in verdict) == (how == "stopped")
    assert "most recent call first" in ended.said, "stacks"
    if how == "lock":
        assert "faulty_pretrain.py" in ended.said.partition("Timeout (")[2], "the stacks of the rank that hangs"
    assert run.checkpoints() == ([4, 6] if how == "reading" else [2, 4])
    assert run.leftovers() == [] and run.new_shared_memory() == set()


@pytest.mark.soak
def test_a_slow_save_on_one_rank_is_not_a_hang(data, tmp_path):
    """Each block of it is progress, so that the ranks that wait do not fire; see also tests/training."""
    run = Run(tmp_path / "run", data, run={"hang_timeout": 2.0}, training={"steps": 6})
    with running(run):
        run.start(faults=[fault(r"(write|synced) \S*/rank-", "sleep 1.5", every=True, rank=1)])
        ended = run.wait()
    assert ended.code == 0, ended.said
