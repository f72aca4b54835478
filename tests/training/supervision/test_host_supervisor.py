"""Two supervisors of one run, as on two hosts, with toys as ranks and clocks that the test turns."""

import os
import signal
import socket
import time

import pytest

from megasparse.errors import LOST_PEER
from megasparse.training.hosts import PERIOD
from tests.helpers.supervised import LIMIT, Toy

pytestmark = pytest.mark.slow

RANKS = """
note("ran", f"{RANK} of {os.environ['WORLD_SIZE']}")
on_signals(lambda n: sys.exit(0))
ready()
taken = HERE / f"end.{RANK}"
while not taken.exists():
    try:
        (HERE / "end").rename(taken)  # by one of a host's ranks, which then ends
    except FileNotFoundError:
        time.sleep(0.01)
code = taken.read_text()
taken.unlink()
sys.exit(int(code))
"""


class Pair:
    """Hosts 0 and 1 with a rank each, or more."""

    def __init__(self, folder):
        for host in (0, 1):
            (folder / f"host-{host}").mkdir()
        self.toys = [Toy(folder / "host-0"), Toy(folder / "host-1")]
        self.toys[1].config.write_text(self.toys[0].config.read_text())  # one run.directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"

    def start(self, host, *options, ranks=1):
        place = ["--ranks", str(ranks), "--nodes", "2", "--node-rank", str(host), "--address", self.address]
        self.toys[host].start(RANKS, *place, "--min-ranks", "1", *options, LAST_WORDS=0.0)

    def until(self, true):
        """Let time pass for both at once, half a second each time that both have acted on what was before."""
        deadline, seen = time.monotonic() + LIMIT, [0, 0]
        while not true():
            said = [toy.said() for toy in self.toys if hasattr(toy, "process")]
            assert time.monotonic() < deadline and "Traceback" not in "".join(said), said
            living = [host for host in (0, 1) if self.looks(host)]
            if all(self.looks(host) >= seen[host] + 4 for host in living):
                seen = [self.looks(host) for host in (0, 1)]
                for host in living:
                    self.toys[host]._set_clock(PERIOD)
            time.sleep(0.01)

    def looks(self, host):
        """How often a supervisor has looked at its clock; 0 where it does not run."""
        file = self.toys[host].folder / "clock.looks"
        lives = hasattr(self.toys[host], "process") and self.toys[host].process.poll() is None
        return file.stat().st_size if lives and file.exists() else 0

    def ran(self, host):
        """What the ranks of a host were told, in each start."""
        return [line for rank in range(4) for line in self.toys[host].notes("ran", rank)]

    def end(self, host, code):
        """Let the ranks of a host end."""
        (self.toys[host].folder / "end.tmp").write_text(str(code))
        (self.toys[host].folder / "end.tmp").rename(self.toys[host].folder / "end")

    def save(self, step):
        (self.toys[0].folder / "run" / "checkpoints" / f"{step:08}").mkdir(parents=True)

    def ended(self, *hosts):
        self.until(lambda: all(self.toys[host].process.poll() is not None for host in hosts))
        return [self.toys[host].process.returncode for host in hosts]


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path)
    yield pair
    left = [toy.leftovers() for toy in pair.toys]
    for toy in pair.toys:
        toy.end()
    assert left == [[], []], "left behind"


def test_the_host_that_is_left_goes_on_and_grows_when_the_other_is_back(pair):
    for host in (0, 1):
        pair.start(host, "--restarts", "1")
    pair.until(lambda: pair.ran(0) == ["0 of 2"] and pair.ran(1) == ["1 of 2"])
    for pid in pair.toys[1].leftovers():
        os.kill(pid, signal.SIGKILL)
    pair.end(0, LOST_PEER)
    pair.until(lambda: len(pair.ran(0)) == 2)
    assert pair.ran(0)[-1] == "0 of 1"
    assert "supervisor: nodes 0 of 2 take part, with 1 ranks" in pair.toys[0].said()
    pair.start(1, "--restarts", "1")
    pair.until(lambda: pair.toys[1].now > 100)
    assert len(pair.ran(0)) == 2, "not before it has saved"
    pair.save(1)
    pair.until(lambda: len(pair.ran(0)) == 3 and len(pair.ran(1)) == 2)
    assert (pair.ran(0)[-1], pair.ran(1)[-1]) == ("0 of 2", "1 of 2")
    assert pair.toys[0].notes("signals", 0) == ["SIGUSR1"]
    for host in (0, 1):
        pair.end(host, 0)
    assert pair.ended(0, 1) == [0, 0]


@pytest.mark.parametrize("fault", [0, 1])
def test_a_host_that_is_at_fault_again_and_again_leaves(pair, fault):
    """The first one too: the other is rank 0 then."""
    for host in (0, 1):
        pair.start(host, "--restarts", "1")
    for start in (1, 2):
        pair.until(lambda start=start: len(pair.ran(0)) == len(pair.ran(1)) == start)
        pair.end(fault, 1)
        pair.end(1 - fault, LOST_PEER)
    assert pair.ended(fault) == [1]
    pair.until(lambda: "0 of 1" in pair.ran(1 - fault))
    pair.end(1 - fault, 0)
    assert pair.ended(1 - fault) == [0]


def test_where_no_host_is_at_fault_all_end(pair):
    for host in (0, 1):
        pair.start(host)
    pair.until(lambda: len(pair.ran(0)) == len(pair.ran(1)) == 1)
    for host in (0, 1):
        pair.end(host, LOST_PEER)
    assert pair.ended(0, 1) == [LOST_PEER, LOST_PEER]
    assert "stopped: no node is at fault that the others could do without" in pair.toys[0].said()
    assert "stopped: node 0 has ended the run" in pair.toys[1].said()


def test_a_host_without_ranks_waits_for_the_end_and_a_signal_ends_one_that_waits(pair):
    for toy in pair.toys:
        toy.config.write_text(toy.config.read_text().replace('"global_batch": 24', '"global_batch": 2'))
    pair.start(1, ranks=2)
    pair.until(lambda: pair.toys[1].now > 10)
    pair.toys[1].signal(signal.SIGTERM)
    assert pair.ended(1) == [0]
    assert "supervisor: stopped: SIGTERM while it waited for other nodes" in pair.toys[1].said()
    for host in (0, 1):
        pair.start(host, ranks=2)
    pair.until(lambda: pair.ran(0) == ["0 of 2", "1 of 2"])
    pair.end(0, 0)
    pair.until(lambda: not (pair.toys[0].folder / "end").exists())
    pair.end(0, 0)
    assert pair.ended(0, 1) == [0, 0]
    assert pair.ran(1) == [] and "stopped: node 0 has ended the run" in pair.toys[1].said()
