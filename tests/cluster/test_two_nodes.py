"""Two hosts, each with its own network, processes and sshd: a run on both by a hostfile, one of them cut off or killed,
and the messages of DeepSpeed's launcher for wrong hostfiles. Needs root; see docs/lab/reliability.md."""

import os
import signal
import time

import pytest

from megasparse.errors import HANG
from tests.cluster.conftest import NOBODY, STEPS, TwoNodes, cluster_run
from tests.helpers.faults import LIMIT, Run, patience

pytestmark = pytest.mark.cluster

HOSTFILE = "node-a slots=1\nnode-b slots=1\n"
BROKEN_CONNECTION = 255
"""Exit code of ssh that lost its host, or whose command was killed; pdsh ends with the largest of its hosts'."""
RANK = ("launch/pretrain.py", "--config")
NOTICED = 12
"""Seconds in which ssh gives up a silent host with ServerAliveInterval 5 and ServerAliveCountMax 2, and a bit."""


@pytest.fixture
def run(two_nodes, tmp_path, data):
    run = cluster_run(tmp_path / "run", data)
    try:
        yield run
    finally:
        two_nodes.clear()
        if run.process is not None:
            run.process.kill()
            run.process.wait()


def goes_on(two_nodes: TwoNodes, run: Run, clean: Run) -> None:
    """The same command finishes the run with losses bit-identical to an undisturbed one."""
    assert 10 <= max(run.checkpoints()) < STEPS
    two_nodes.start(run, HOSTFILE)
    ended = run.wait()
    assert ended.code == 0, ended.said
    assert run.losses() == clean.losses()


def test_two_nodes_train_as_two_ranks_of_one(two_nodes, run, clean):
    two_nodes.start(run, HOSTFILE)
    ended = run.wait()
    assert ended.code == 0, ended.said
    assert run.losses() == clean.losses()
    assert "node-a" in ended.said and "node-b" in ended.said


def test_a_disconnected_node_is_named_and_the_run_resumes(two_nodes, run, clean, figures):
    two_nodes.start(run, HOSTFILE)
    run.wait_for_step(25)
    two_nodes.b.do("ip", "link", "set", "eth0", "down")
    cut = time.monotonic()
    try:
        run.wait_until(lambda: "HANG:" in run.said())
        noticed = time.monotonic() - cut
        ended = run.wait(since=cut)
        while two_nodes.b.processes(*RANK) and time.monotonic() < cut + 60:
            time.sleep(0.1)
        assert two_nodes.b.processes(*RANK) == [], "what was cut off ends too"
    finally:
        two_nodes.b.do("ip", "link", "set", "eth0", "up")
    figures(longest_cut_noticed_seconds=noticed, longest_cut_ended_seconds=ended.seconds)
    assert ended.code == BROKEN_CONNECTION, ended.said
    verdict = next(line for line in ended.said.splitlines() if "HANG:" in line)
    assert "HANG: rank 1 on node-b" in verdict and f"ends with exit code {HANG}" in verdict, verdict
    assert 4 < noticed < 5 + 3 * patience() and ended.seconds < NOTICED + 5 * patience()
    goes_on(two_nodes, run, clean)


def test_a_run_survives_the_killed_processes_of_a_node(two_nodes, run, clean, figures):
    two_nodes.start(run, HOSTFILE)
    run.wait_for_step(25)
    for pid in two_nodes.b.processes(*RANK):
        os.kill(pid, signal.SIGKILL)
    ended = run.wait(since=time.monotonic())
    figures(longest_kill_ended_seconds=ended.seconds)
    assert ended.code == BROKEN_CONNECTION and ended.seconds < 5 * patience(), ended.said
    assert "error: the connection to another rank was lost" in ended.said
    goes_on(two_nodes, run, clean)


def test_runs_on_two_one_and_two_nodes_keep_the_batch(two_nodes, run, clean):
    """To the last bit on as many nodes as before; on another number sums have another order."""
    for hostfile, stop in ((HOSTFILE, 40), ("node-a slots=1\n", 80), (HOSTFILE, STEPS)):
        two_nodes.start(run, hostfile, stop_at=stop)
        ended = run.wait()
        assert ended.code == 0, ended.said
        assert max(run.checkpoints()) == max(run.losses()) == stop
    for step, loss in clean.losses().items():
        if step <= 40:
            assert run.losses()[step] == loss
        assert float.fromhex(run.losses()[step]) == pytest.approx(float.fromhex(loss), rel=1e-5), step


@pytest.mark.parametrize(
    ("hostfile", "options", "code"),
    [("node-a slots=1\nnode-c slots=1\n", (), BROKEN_CONNECTION), (HOSTFILE, ("--master_addr", NOBODY), HANG)],
    ids=["second host", "address"],
)
def test_an_unreachable_node_ends_the_run_in_time(two_nodes, run, hostfile, options, code):
    two_nodes.start(run, hostfile, *options)
    ended = run.wait(limit=50 + LIMIT)
    assert ended.code == code, ended.said
    assert "HANG: rank 0 on node-a waited 50 s for the 2 ranks to meet at 10.77.0." in ended.said
    assert not run.directory.exists()
