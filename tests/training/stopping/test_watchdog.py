"""Hangs of every kind: the ranks' decisions on a clock that the test turns, and the end of processes that do hang."""

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.distributed import HashStore

from megasparse.errors import HANG
from megasparse.training.stopping.watchdog import STORE_FAILS, Watchdog

ROOT = Path(__file__).parents[3]
TIMEOUT = 10.0


class Ranks:
    """Watchdogs of one launch on one clock, which moves only by `pass_time`; no thread runs."""

    def __init__(self, world_size: int = 2):
        self.now, self.stop_wanted, self.store = 0.0, set[int](), HashStore()
        self.ranks = [
            Watchdog(self.store, rank, world_size, TIMEOUT, lambda rank=rank: rank in self.stop_wanted, self._clock)
            for rank in range(world_size)
        ]

    def _clock(self) -> float:
        return self.now

    def do(self, rank: int, *work: str) -> None:
        for doing in work:
            self.ranks[rank].progress(doing)

    def exchange(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.ranks)):
            self.ranks[rank].exchange(self.store)

    def pass_time(self, seconds: float, *alive: int) -> None:
        """Turn the clock; the ranks `alive` (all if none is named) then exchange heartbeats."""
        self.now += seconds
        self.exchange(*alive)
        self.exchange(*alive)  # and have read what the others wrote

    def hang(self, rank: int = 0) -> str | None:
        return self.ranks[rank].hang()

    def culprits(self, rank: int = 0) -> str:
        line = self.hang(rank)
        assert line is not None
        return line.split(". Rank")[0]


@pytest.fixture
def timers(monkeypatch):
    """Seconds of the timers set for a main thread that holds Python's lock."""
    seconds: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda after, **_: seconds.append(after))
    return seconds


@pytest.fixture
def two(timers):
    """Two ranks in their third step."""
    return started(Ranks())


def end(watchdog: Watchdog) -> None:
    """Leave it without an error, as its rank does at the end of training."""
    watchdog._exchange_thread, watchdog._decision_thread = (threading.Thread(target=int) for _ in range(2))
    with watchdog:
        pass


def started(ranks: Ranks) -> Ranks:
    for rank in range(len(ranks.ranks)):
        ranks.do(rank, "step 1", "step 2", "step 3, micro-batch 1")
    ranks.pass_time(0)
    return ranks


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_name_the_rank_behind_and_its_activity(timers, world_size):
    ranks, culprit = started(Ranks(world_size)), world_size - 1
    for rank in range(culprit):
        ranks.do(rank, "step 3, update")
    ranks.pass_time(TIMEOUT - 0.1)
    assert not any(ranks.hang(rank) for rank in range(world_size))
    ranks.pass_time(0.1)
    for rank in range(world_size):
        named = ranks.culprits(rank)
        assert named.startswith(f"HANG: rank {culprit} on ") and "rank 0" not in named
        assert f"(pid {os.getpid()}, " in named and '"step 3, micro-batch 1" for 10.0 s' in named
    assert "(limit 10 s, run.hang_timeout=10)" in str(ranks.hang())
    assert set(timers) == {TIMEOUT + 3}  # a rank that holds the lock of Python is named by others first


def test_ranks_that_all_wait_at_the_same_place_suspect_the_network(two):
    two.pass_time(TIMEOUT)
    named = two.culprits()
    assert "rank 0 on" in named and "rank 1 on" in named
    assert "no rank is behind the others: is the network between them down?" in named


@pytest.mark.parametrize("ahead", [0, 50], ids=["the slow one behind", "the slow one ahead"])
def test_no_watchdog_fires_while_one_rank_makes_progress(two, ahead):
    two.do(0, *["saving"] * ahead)
    two.do(1, *["saved"] * 20)
    for part in range(14):
        two.do(0, f"saving part {part}")
        two.pass_time(0.9 * TIMEOUT)
        assert two.hang(0) is None and two.hang(1) is None
    two.pass_time(4 * TIMEOUT)
    assert two.hang(0) and two.hang(1)


def test_a_rank_that_failed_is_named_and_one_that_ended_is_not(timers):
    ranks = started(Ranks(3))
    end(ranks.ranks[1])
    ranks.do(0, "step 3, update")
    ranks.exchange(0)
    ranks.pass_time(TIMEOUT, 0)
    named = ranks.culprits()
    assert named.startswith("HANG: rank 2 on") and "has been silent for 10.0 s" in named
    assert "rank 1" not in named and "(ended before: 1)" in named


def test_slow_steps_raise_the_limit_to_four_of_them(timers):
    alone = started(Ranks(1))
    alone.pass_time(4.0)
    alone.do(0, "step 4")
    alone.pass_time(15.9)
    assert alone.hang() is None
    alone.pass_time(0.1)
    assert alone.hang()


def test_the_start_and_first_step_have_ten_times_the_limit_and_do_not_change_it(timers):
    alone = Ranks(1)
    for doing in ("step 1, micro-batch 1", "step 1, update", "step 2"):
        alone.pass_time(10 * TIMEOUT - 0.1)
        assert alone.hang() is None
        assert not timers
        alone.do(0, doing)
    assert timers == [TIMEOUT + 1]
    alone.pass_time(TIMEOUT)
    assert alone.hang()
    first = Ranks(1)
    first.do(0, "step 1")
    first.pass_time(10 * TIMEOUT)
    assert first.hang()


def test_a_rank_that_never_starts_is_named(timers):
    ranks = Ranks()
    ranks.do(0, "step 1", "step 2", "step 3")
    ranks.pass_time(10 * TIMEOUT - 0.1, 0)
    assert not ranks.ranks[0].stop_elsewhere() and ranks.hang() is None
    ranks.pass_time(0.1, 0)
    assert ranks.culprits() == "HANG: rank 1 has not been heard of since the start, 100.0 s ago"


def test_a_heartbeat_contains_progress_and_a_request_to_stop(two):
    two.do(0, "step 4, " + "\N{GRINNING FACE}" * 1000)
    two.pass_time(1.0)
    two.ranks[0].alive("saving")  # a sign of life, but none that brings this rank ahead of the others
    two.stop_wanted.add(0)
    two.exchange()
    beat = json.loads(two.store.get("0"))
    assert (beat["counter"], beat["doing"], beat["age"], beat["ended"]) == (4, "saving", 0, False)
    assert beat["pid"] == os.getpid() and two.ranks[1].stop_elsewhere() and not two.ranks[0].stop_elsewhere()


@pytest.mark.parametrize("silent", [(0,), (0, 3), (3,)])
def test_ranks_that_fall_silent_are_named_though_rank_0_is_one_of_them(timers, silent):
    ranks = started(Ranks(4))
    for _ in range(25):
        ranks.pass_time(0.5, *{0, 1, 2, 3}.difference(silent))
    for observer in (1, 2):
        names = re.findall(r"rank (\d) on \S+ \(pid [^)]*\)+ has been silent for 1\d\.\d s", ranks.culprits(observer))
        assert names == [str(rank) for rank in silent]
        assert ranks.culprits(observer).count(" on ") == len(silent)


# Processes that hang, on the real clock. They wait as long as it takes to be ended; no test measures how long.

LIMIT = 120.0
"""Seconds after which a test gives up on a process."""

RANK = """
import os, sys, time
from torch.distributed import TCPStore
from megasparse.training.stopping.watchdog import Watchdog
{before}
def hang():
    time.sleep(600)

with Watchdog({store}, {rank}, {world_size}, {timeout}, lambda: False) as watchdog:
    for number in (1, 2, 3):
        watchdog.progress(f"step {{number}}, micro-batch 1")
    {body}
"""


@pytest.fixture
def start():
    """Starts a rank that runs `body` in its third step."""
    processes: list[subprocess.Popen[str]] = []

    def begin(body: str, timeout: float = 0.5, before: str = "", port: int | None = None) -> subprocess.Popen[str]:
        store = None if port is None else f"TCPStore('127.0.0.1', {port}, 2, False)"
        ranks = {"store": store, "rank": 0 if port is None else 1, "world_size": 1 if port is None else 2}
        code = RANK.format(body=body, timeout=timeout, before=before, **ranks)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def test_a_rank_that_hangs_ends_with_its_stacks(start):
    rank = start("hang()")
    _, said = rank.communicate(timeout=LIMIT)
    assert rank.returncode == HANG
    assert len(re.findall("^HANG: rank 0 on", said, flags=re.MULTILINE)) == 1 and "in hang" in said


def test_a_rank_that_holds_pythons_lock_prints_its_stacks(start):
    before = "import re\ndef catastrophic():\n    re.match('(a+)+$', 'a' * 60 + 'b')"
    rank = start("catastrophic()", before=before)
    _, said = rank.communicate(timeout=LIMIT)
    assert rank.returncode == 1 and "in catastrophic" in said


def test_without_a_timeout_no_watchdog_fires(start):
    rank = start("time.sleep(1.5); print(os.getpid(), file=sys.stderr)", timeout=0)
    assert rank.communicate(timeout=LIMIT) == (None, f"{rank.pid}\n") and rank.returncode == 0


@pytest.mark.parametrize(
    ("how", "timeout", "body"),
    [
        (signal.SIGSTOP, 0.3, "hang()"),
        (signal.SIGKILL, 100, "time.sleep(1)"),
        pytest.param(signal.SIGSTOP, 100, "time.sleep(1)", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 0.3, "hang()", marks=pytest.mark.slow),
    ],
)
def test_a_store_that_never_answers_is_not_fatal_and_named_if_the_rank_hangs(start, how, timeout, body):
    serve = "store = TCPStore('127.0.0.1', 0, 2, True, wait_for_workers=False)"
    host = start(f"{serve}; print(store.port, file=sys.stderr, flush=True); hang()", timeout=0)
    port = int(host.stderr.readline())
    rank = start(f"os.kill({host.pid}, {int(how)}); {body}", timeout, port=port)
    _, said = rank.communicate(timeout=LIMIT)
    assert rank.returncode == (HANG if body == "hang()" else 0)
    assert said.count(f"rank 1: {STORE_FAILS} (") == (how == signal.SIGKILL)
    assert (f"HANG: {STORE_FAILS}: it is stopped, gone or cut off" in said) == (body == "hang()")
