"""torchrun --nnodes=1:2 on two hosts: one is lost, the other resumes, then both after its return. Needs root."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.cluster.conftest import SETTINGS, cluster_run
from tests.helpers.faults import LIMIT, SCRIPT, TORCHRUN, Run, fault
from tests.helpers.hosts import Host

pytestmark = pytest.mark.cluster

RENDEZVOUS = "--rdzv-backend=c10d --rdzv-endpoint=node-a:29500 --rdzv-id=run"
NODES = f"--nnodes=1:2 --nproc-per-node=1 --max-restarts=5 {RENDEZVOUS}"


class Elastic:
    """torchrun on each of two hosts, with one rank each, whose steps take a second or so."""

    def __init__(self, run: Run, hosts: list[Host]):
        self.run, self.hosts = run, hosts
        self.log = run.folder / "log.txt"
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, host: int) -> None:
        faults = json.dumps({"folder": str(self.run.folder), "faults": [fault("forward", "sleep 0.2", every=True)]})
        script = [str(SCRIPT), "--config", str(self.run.folder / "config.json")]
        settings = [*SETTINGS, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]  # see docs/nodes.md
        command = ["env", *settings, f"MEGASPARSE_FAULTS={faults}", *TORCHRUN, *NODES.split(), *script]
        line = self.hosts[host].command(*command, folder=self.run.folder)
        with self.log.open("ab") as log:
            self.processes[host] = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self, host: int) -> None:
        """SIGKILL to everything of a host."""
        for pid in self.hosts[host].processes(str(SCRIPT)):
            os.kill(pid, signal.SIGKILL)
        self.processes.pop(host).wait()

    def wait_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 2 * LIMIT
        while not true():
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")
            assert all(process.poll() is None for process in self.processes.values()), self.log.read_text()
            time.sleep(0.02)


@pytest.fixture
def elastic(pair, tmp_path, data):
    run = cluster_run(tmp_path / "run", data, run={"hang_timeout": 20.0})
    pair[1].do("bash", "-c", "echo 10000 > /proc/sys/kernel/ns_last_pid")  # whose processes have other numbers
    elastic = Elastic(run, pair)
    yield elastic
    for host in list(elastic.processes):
        elastic.kill(host)


def test_a_lost_host_shrinks_the_job_and_its_return_grows_it(elastic, clean, figures):
    run = elastic.run
    elastic.start(0)
    elastic.start(1)
    elastic.wait_until(lambda: max(run.losses(), default=0) >= 25)
    elastic.kill(1)
    lost, newest = time.monotonic(), max(run.checkpoints())
    elastic.wait_until(lambda: len(run.first_steps()) == 2)
    seconds = time.monotonic() - lost
    elastic.wait_until(lambda: max(run.losses()) > newest + 15)
    elastic.start(1)
    elastic.wait_until(lambda: len(run.first_steps()) == 3)
    for process in elastic.processes.values():
        assert process.wait(2 * LIMIT) == 0, elastic.log.read_text()
    figures(longest_lost_host_to_new_step_seconds=seconds)
    _, alone, *_, both = run.first_steps()
    assert alone == newest + 1 < both
    rank_1 = [int(line.split()[1]) for line in (run.folder / "samples-1.txt").read_text().splitlines()]
    assert set(range(both, max(clean.losses()) + 1)) <= set(rank_1), "both hosts train again"
    for step, loss in clean.losses().items():
        assert step >= alone or run.losses()[step] == loss
        assert float.fromhex(run.losses()[step]) == pytest.approx(float.fromhex(loss), rel=1e-5), step
