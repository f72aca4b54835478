"""One of two hosts vanishes: the other goes on with the same batches, and with both when it is back. Needs root."""

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster.conftest import SETTINGS, STEPS, cluster_run
from tests.helpers.faults import LIMIT, SCRIPT, SUPERVISE, Run, fault
from tests.helpers.hosts import Host
from tests.reliability.test_restarts import sequences_of

pytestmark = pytest.mark.cluster


class Supervised:
    """A supervisor on each of two hosts, of one rank each, whose steps take a second or so."""

    def __init__(self, run: Run, hosts: list[Host]):
        self.run, self.hosts = run, hosts
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.logs: dict[int, Path] = {}

    def start(self, number: int) -> None:
        place = ["--ranks", "1", "--nodes", "2", "--node-rank", str(number), "--address", "node-a:29500"]
        policy = ["--restarts", "2", "--min-ranks", "1"]
        script = [str(SCRIPT), "--config", str(self.run.folder / "config.json")]
        faults = json.dumps({"folder": str(self.run.folder), "faults": [fault("forward", "sleep 0.2", every=True)]})
        command = ["env", *SETTINGS, f"MEGASPARSE_FAULTS={faults}", sys.executable, str(SUPERVISE)]
        line = self.hosts[number].command(*command, *place, *policy, *script, folder=self.run.folder)
        self.logs[number] = self.run.folder / f"host-{number}-{time.monotonic()}.txt"
        with self.logs[number].open("wb") as log:
            self.processes[number] = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def vanish(self, number: int) -> None:
        """SIGKILL to everything of a host."""
        for pid in self.hosts[number].processes(str(SCRIPT)):
            os.kill(pid, signal.SIGKILL)
        self.processes.pop(number).wait()

    def said(self, number: int) -> str:
        return self.logs[number].read_text(errors="replace")

    def until(self, number: int, words: str, limit: float = 2 * LIMIT) -> None:
        """Wait until a supervisor, or its rank, has said that."""
        self._wait(lambda: words in self.said(number), limit)

    def until_step(self, step: int) -> None:
        self._wait(lambda: max(self.run.losses(), default=0) >= step, 2 * LIMIT)

    def _wait(self, true, limit: float) -> None:
        deadline = time.monotonic() + limit
        while not true():
            said = {number: self.said(number) for number in self.processes}
            assert time.monotonic() < deadline, said
            assert all(process.poll() is None for process in self.processes.values()), said
            time.sleep(0.02)

    def end(self) -> None:
        for number in list(self.processes):
            self.vanish(number)


@pytest.fixture
def supervised(pair, tmp_path, data):
    run = cluster_run(tmp_path / "run", data, run={"hang_timeout": 20.0})
    pair[1].do("bash", "-c", "echo 10000 > /proc/sys/kernel/ns_last_pid")  # whose processes have other numbers
    supervised = Supervised(run, pair)
    yield supervised
    supervised.end()


def undone(run: Run, rank: int, newest: int) -> None:
    """Forget what a rank that is gone did after the checkpoint that the others go on from."""
    path = run.folder / f"samples-{rank}.txt"
    kept = [line for line in path.read_text().splitlines() if int(line.split()[1]) <= newest]
    path.write_text("".join(f"{line}\n" for line in kept))


@pytest.mark.parametrize("gone", [1, 0], ids=["second", "first"])
def test_one_host_vanishes_the_other_goes_on_and_both_when_it_is_back(supervised, clean, data, figures, gone):
    run, left = supervised.run, 1 - gone
    for number in (0, 1):
        supervised.start(number)
    supervised.until_step(25)
    killed = time.monotonic()
    supervised.vanish(gone)
    supervised.until(left, f"nodes {left} of 2 take part, with 1 ranks")
    alone = max(run.checkpoints())
    undone(run, 1, alone)
    supervised.until_step(max(run.losses()) + 1)
    seconds = time.monotonic() - killed
    supervised.start(gone)
    supervised.until(gone, "nodes 0, 1 of 2 take part, with 2 ranks")
    grown = max(run.checkpoints())
    assert grown > alone
    for process in supervised.processes.values():
        assert process.wait(2 * LIMIT) == 0, [supervised.said(number) for number in (0, 1)]
    figures(longest_lost_host_to_new_step_seconds=seconds)
    assert run.first_steps()[0] == 1 and {alone + 1, grown + 1} <= set(run.first_steps())
    assert run.samples() == clean.samples()
    trained = {sample: crc for step in run.samples().values() for sample, crc in step.items()}
    assert sorted(trained) == list(range(STEPS * 4))
    sequences = sequences_of(data)
    assert Counter(trained[number] for number in range(len(sequences))) == Counter(map(zlib.crc32, sequences))
    for step, loss in clean.losses().items():
        assert step > alone or run.losses()[step] == loss
        assert float.fromhex(run.losses()[step]) == pytest.approx(float.fromhex(loss), rel=1e-5), step
