"""Hangs of every kind: the ranks' decisions on a clock that the test turns, and the end of processes that do hang."""

import faulthandler
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megasparse.errors import HANG
from megasparse.training.stopping import watchdog
from megasparse.training.stopping.watchdog import Heartbeat, Watchdog

ROOT = Path(__file__).parents[3]
TIMEOUT = 10.0


class Ranks:
    """Watchdogs of one launch on one clock, which moves only by `pass_time`; no thread runs."""

    def __init__(self, folder: Path, world_size: int = 2, launch: str = "this"):
        self.now, self.stop_wanted, folder = 0.0, set[int](), folder / "heartbeats"
        folder.mkdir(exist_ok=True)
        self.ranks = [
            Watchdog(folder, launch, rank, world_size, TIMEOUT, lambda rank=rank: rank in self.stop_wanted, self._clock)
            for rank in range(world_size)
        ]

    def _clock(self) -> float:
        return self.now

    def do(self, rank: int, *work: str) -> None:
        for doing in work:
            self.ranks[rank].progress(doing)

    def exchange(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.ranks)):
            self.ranks[rank].exchange()

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
def two(tmp_path, timers):
    """Two ranks in their third step."""
    return started(Ranks(tmp_path))


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
def test_all_ranks_name_the_rank_behind_and_its_activity(tmp_path, timers, world_size):
    ranks, culprit = started(Ranks(tmp_path, world_size)), world_size - 1
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


def test_a_rank_that_failed_is_named_and_one_that_ended_is_not(tmp_path, timers):
    ranks = started(Ranks(tmp_path, 3))
    end(ranks.ranks[1])
    ranks.do(0, "step 3, update")
    ranks.exchange(0)
    ranks.pass_time(TIMEOUT, 0)
    named = ranks.culprits()
    assert named.startswith("HANG: rank 2 on") and "has been silent for 10.0 s" in named
    assert "rank 1" not in named and "(ended before: 1)" in named


def test_slow_steps_raise_the_limit_to_four_of_them(tmp_path, timers):
    alone = started(Ranks(tmp_path, 1))
    alone.pass_time(4.0)
    alone.do(0, "step 4")
    alone.pass_time(15.9)
    assert alone.hang() is None
    alone.pass_time(0.1)
    assert alone.hang()


def test_the_start_and_first_step_have_ten_times_the_limit_and_do_not_change_it(tmp_path, timers):
    alone = Ranks(tmp_path, 1)
    for doing in ("step 1, micro-batch 1", "step 1, update", "step 2"):
        alone.pass_time(10 * TIMEOUT - 0.1)
        assert alone.hang() is None
        assert not timers
        alone.do(0, doing)
    assert timers == [TIMEOUT + 1]
    alone.pass_time(TIMEOUT)
    assert alone.hang()
    first = Ranks(tmp_path, 1)
    first.do(0, "step 1")
    first.pass_time(10 * TIMEOUT)
    assert first.hang()


def test_files_of_an_earlier_launch_are_ignored_and_a_silent_rank_is_named(tmp_path, timers):
    earlier = Ranks(tmp_path, 3, "earlier")
    earlier.stop_wanted = {1, 2}
    earlier.exchange()
    ranks = Ranks(tmp_path)
    ranks.do(0, "step 1", "step 2", "step 3")
    ranks.pass_time(10 * TIMEOUT - 0.1, 0)
    assert not ranks.ranks[0].stop_elsewhere() and ranks.hang() is None
    ranks.pass_time(0.1, 0)
    assert ranks.culprits() == "HANG: rank 1 has not been heard of since the start, 100.0 s ago"


@pytest.mark.parametrize("short", [False, True], ids=["full", "cut short"])
def test_a_heartbeat_that_cannot_be_written_is_reported_once_and_not_fatal(two, short, monkeypatch, capfd):
    pwrite = os.pwrite

    def fail(file: int, data: bytes, offset: int) -> int:
        if short:
            return pwrite(file, data[:100], offset)
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", fail)
    two.exchange(0)
    two.exchange(0)
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "rank 0: heartbeats" in said and "No space left on device" in said
    two.pass_time(TIMEOUT / 2, 0)
    assert two.hang() is None


def test_the_heartbeat_file_is_rewritten_in_place(two, tmp_path):
    """The heartbeat needs no space on a disk that has become full."""
    path = tmp_path / "heartbeats" / "rank-00000.json"
    seen = set()
    for turn in range(3):
        two.do(0, f"step {turn}, " + "\N{GRINNING FACE}" * 1000)
        two.pass_time(1.0)
        seen.add((path.stat().st_ino, path.stat().st_size))
        record = json.loads(path.read_text())["heartbeat"]
        assert record["counter"] == turn + 4 and record["doing"].startswith(f"step {turn}, ")
        assert record["age"] == 1.0 and not record["ended"]
    two.ranks[0].alive("saving")  # a sign of life, but none that brings this rank ahead of the others
    two.exchange()
    after = json.loads(path.read_text())["heartbeat"]
    assert (after["counter"], after["doing"], after["age"]) == (6, "saving", 0)
    assert after["beats"] > record["beats"] and after["pid"] == os.getpid() and after["launch"] == "this"
    assert len(seen) == 1 and path.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize(("stopped", "name"), [(1, "rank-00001.json"), (0, "ranks.jsonl")])
def test_a_damaged_record_is_never_believed_and_the_one_before_stays(two, tmp_path, stopped, name):
    two.stop_wanted.add(stopped)
    two.exchange(stopped)
    path = tmp_path / "heartbeats" / name
    good = path.read_bytes()
    digit = good.rindex(b'"pid": ') + len(b'"pid": ')
    wrong = good[:digit] + bytes([good[digit] ^ 1]) + good[digit + 1 :]
    damaged = [b"", good[:1], good[:60], good[: len(good.rstrip()) - 1], b"\0" * len(good), b"\xff\xfe", b"[1, 2]"]
    damaged += [wrong, b"[" * 4096, b'{"crc32": 1}', good.replace(b"doing", b"being")]
    listener = two.ranks[1 - stopped]
    for content in damaged:
        path.write_bytes(content)
        listener.exchange()
        assert not listener.stop_elsewhere(), content
    path.write_bytes(good)
    listener.exchange()
    assert listener.stop_elsewhere()
    path.write_bytes(good[:60])
    listener.exchange()
    assert listener.stop_elsewhere()


@pytest.mark.parametrize("change", [{"beats": "x"}, {"age": None}, {"rank": [1]}, {"stop": 1}, {"doing": 5}, {}])
def test_a_record_of_other_types_is_damaged(change):
    beat = Heartbeat("a", 1, "host", 7, 3, 2, 0.5, "step 3", False, 120, False)
    fields = vars(beat) | change
    line = json.dumps({"crc32": watchdog._checksum(fields), "heartbeat": fields}).encode()
    assert watchdog.decode(line) == (None if change else beat)


RECORDS: list[list[str]] = []
"""Lists to which the process appends each path that it opens with os.open, as `files.open_regular` does."""
sys.addaudithook(
    lambda event, values: (
        [p.append(str(values[0])) for p in RECORDS] if (event, values[1:2]) == ("open", (None,)) else 0
    )
)


@pytest.fixture
def opened():
    RECORDS.append([])
    yield RECORDS[0]
    RECORDS.clear()


@pytest.mark.parametrize("world_size", [1, 2, 8, 64])
def test_ranks_open_three_files_each_per_period(tmp_path, timers, opened, world_size):
    ranks = started(Ranks(tmp_path, world_size))
    ranks.pass_time(0.5)
    opened.clear()
    ranks.exchange()
    files = [path for path in opened if path.startswith(str(tmp_path))]
    assert len(files) == (3 * world_size - 1 if world_size > 1 else 1)


@pytest.mark.parametrize("silent", [(0,), (0, 3), (3,)])
def test_ranks_that_fall_silent_are_named_though_rank_0_is_one_of_them(tmp_path, timers, silent):
    ranks = started(Ranks(tmp_path, 4))
    ranks.exchange(*silent)  # rank 3 writes what is not in the table of rank 0 yet
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
from pathlib import Path
from megasparse.training.stopping.watchdog import Watchdog
{before}
def hang():
    time.sleep(600)

with Watchdog(Path({folder!r}), "this", 0, 1, {timeout}, lambda: False) as watchdog:
    for number in (1, 2, 3):
        watchdog.progress(f"step {{number}}, micro-batch 1")
    {body}
"""


@pytest.fixture
def start(tmp_path):
    """Starts a rank that runs `body` in its third step."""
    processes: list[subprocess.Popen[str]] = []

    def begin(
        body: str, timeout: float = 0.5, before: str = "", stderr: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        code = RANK.format(folder=str(tmp_path / "heartbeats"), body=body, timeout=timeout, before=before)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        processes.append(subprocess.Popen([sys.executable, "-c", code], stderr=stderr, text=True, env=environment))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def test_a_rank_that_hangs_ends_with_its_stacks_and_its_last_heartbeat(start, tmp_path):
    rank = start("hang()")
    _, said = rank.communicate(timeout=LIMIT)
    assert rank.returncode == HANG
    assert len(re.findall("^HANG: rank 0 on", said, flags=re.MULTILINE)) == 1 and "in hang" in said
    record = json.loads((tmp_path / "heartbeats" / "rank-00000.json").read_text())["heartbeat"]
    assert record["age"] >= record["limit"] == 0.5


def test_a_rank_that_holds_pythons_lock_prints_its_stacks(start):
    before = "import re\ndef catastrophic():\n    re.match('(a+)+$', 'a' * 60 + 'b')"
    rank = start("catastrophic()", before=before)
    _, said = rank.communicate(timeout=LIMIT)
    assert rank.returncode == 1 and "in catastrophic" in said


def test_without_a_timeout_no_watchdog_fires(start):
    rank = start("time.sleep(1.5); print(os.getpid(), file=sys.stderr)", timeout=0)
    assert rank.communicate(timeout=LIMIT) == (None, f"{rank.pid}\n") and rank.returncode == 0


def test_a_file_system_that_never_answers_is_not_fatal_and_hides_no_hang(start):
    stuck = "os.open = lambda *_: time.sleep(600)"
    assert start("pass", timeout=100, before=stuck).wait(timeout=LIMIT) == 0
    assert start("hang()", before=stuck).wait(timeout=LIMIT) == HANG
