"""Hangs of every kind, on processes of their own that wait for each other: who fires, when, and what is said."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megasparse.errors import HANG
from megasparse.training.stopping.watchdog import Watchdog

ROOT = Path(__file__).parents[3]
TIMEOUT = 1.0
LATEST = 2.0
"""Seconds after the limit in which a hang must have been found."""

RANK = """
import os, sys, time
from pathlib import Path
from megasparse.training.stopping.watchdog import Watchdog

def hang(doing):
    watchdog.progress(doing)
    print(time.monotonic(), flush=True)
    time.sleep(60)

def step(number):
    watchdog.progress(f"step {{number}}, micro-batch 1")
    time.sleep(0.05)

{before}
with Watchdog(Path({folder!r}), {launch!r}, {rank}, {world_size}, {timeout}, lambda: False) as watchdog:
{body}
"""
STEPS = "step(1); step(2)"


class Rank:
    """A process that runs `body` under a watchdog; prints when it begins to hang."""

    def __init__(
        self,
        folder: Path,
        body: str,
        rank: int = 0,
        world_size: int = 2,
        timeout: float = TIMEOUT,
        launch: str = "this",
        before: str = "",
        stderr: int = subprocess.PIPE,
    ):
        body = "\n".join("    " + line for line in body.splitlines())
        code = RANK.format(
            folder=str(folder),
            body=body,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            launch=launch,
            before=before,
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def hangs_since(self) -> float:
        """Waits until it hangs."""
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())

    def end(self, within: float) -> tuple[int, str]:
        """Exit code and stderr."""
        try:
            _, said = self.process.communicate(timeout=within)
            return self.process.returncode, said
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within} s") from None


Start = Callable[..., Rank]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a rank in this test's folder; all are killed at its end."""
    ranks: list[Rank] = []

    def begin(body: str, **settings: object) -> Rank:
        ranks.append(Rank(tmp_path / "heartbeats", body, **settings))  # type: ignore[arg-type]
        return ranks[-1]

    yield begin
    for rank in ranks:
        rank.process.kill()
        rank.process.wait()
        for stream in (rank.process.stdout, rank.process.stderr):
            if stream is not None:
                stream.close()


def verdict(said: str) -> str:
    (line,) = re.findall("^HANG: .*$", said, flags=re.MULTILINE)
    return line


def detected(began: float, limit: float = TIMEOUT) -> None:
    seconds = time.monotonic() - began
    assert limit - 0.2 <= seconds <= limit + LATEST, f"found after {seconds:.2f} s, limit {limit} s"


LATE = """
pwrite = os.pwrite
def first_pwrite(*arguments):
    time.sleep(0.02)
    os.pwrite = pwrite
    return pwrite(*arguments)
os.pwrite = first_pwrite
"""
"""Heartbeats are written just after the judge has looked, not just before."""


@pytest.mark.parametrize("world_size", [2, 3])
def test_S3_a_rank_asleep_is_named_by_all_with_what_it_was_doing(start: Start, tmp_path: Path, world_size: int) -> None:
    asleep = LATE + "def read_a_shard_forever():\n    hang('step 3, reading data')"
    waiting = f"{STEPS}\nstep(3)\nhang('step 3, micro-batch 2')"
    ranks = [start(waiting, rank=rank, world_size=world_size, before=LATE) for rank in range(world_size - 1)]
    culprit = world_size - 1
    ranks.append(start(f"{STEPS}\nread_a_shard_forever()", rank=culprit, world_size=world_size, before=asleep))
    began = max([rank.hangs_since() for rank in ranks])
    for rank in ranks:
        code, said = rank.end(TIMEOUT + LATEST)
        assert code == HANG
        named = verdict(said).split(". Rank")[0]
        assert named.startswith(f"HANG: rank {culprit} on ") and "rank 0" not in named
        assert f"pid {ranks[-1].process.pid}, " in named
        assert '"step 3, reading data" for 1.' in named
        assert ("in read_a_shard_forever" in said) == (rank is ranks[-1])
        assert "in hang" in said
    detected(began)
    for rank in range(world_size):  # each was found hanging, so none took the end of another for the cause
        record = json.loads((tmp_path / "heartbeats" / f"rank-{rank:05}.json").read_text())["heartbeat"]
        assert record["age"] >= record["limit"] == TIMEOUT


def test_S3_a_stopped_rank_is_named_as_stopped(start: Start) -> None:
    waiting, stopped = start(f"{STEPS}\nhang('step 2, update')"), start(f"{STEPS}\nhang('step 2, update')", rank=1)
    stopped.hangs_since()
    time.sleep(0.3)  # a heartbeat or two
    os.kill(stopped.process.pid, signal.SIGSTOP)
    began = max(waiting.hangs_since(), time.monotonic())
    code, said = waiting.end(TIMEOUT + LATEST)
    assert code == HANG
    assert f"HANG: rank 1 on {os.uname().nodename} (pid {stopped.process.pid}, T (stopped))" in verdict(said)
    assert "has been silent for 1." in verdict(said)
    detected(began)


def test_S3_a_rank_that_holds_pythons_lock_is_named_and_prints_its_stacks(start: Start) -> None:
    search = "import re\ndef catastrophic():\n    re.match('(a+)+$', 'a' * 40 + 'b')"
    waiting = start(f"{STEPS}\nhang('step 2, update')")
    body = f"{STEPS}\nwatchdog.progress('step 2, tokenizing')\ntime.sleep(0.3)\n"
    body += "print(time.monotonic(), flush=True)\ncatastrophic()"
    holding = start(body, rank=1, before=search)
    began = max(waiting.hangs_since(), holding.hangs_since())
    code, said = waiting.end(TIMEOUT + LATEST)
    detected(began)
    assert code == HANG
    assert "HANG: rank 1 on" in verdict(said) and '"step 2, tokenizing"' in verdict(said)
    assert "network" not in verdict(said)
    code, said = holding.end(TIMEOUT + 5.0)
    assert code == 1
    assert "in catastrophic" in said
    detected(began, limit=TIMEOUT + 2.5)


def test_S3_ranks_that_all_wait_at_the_same_place_suspect_the_network(start: Start) -> None:
    ranks = [start(f"{STEPS}\nhang('step 2, update')", rank=rank) for rank in range(2)]
    for rank in ranks:
        code, said = rank.end(10)
        assert code == HANG and "rank 0 on" in verdict(said) and "rank 1 on" in verdict(said)
        assert "no rank is behind the others: is the network between them down?" in verdict(said)


@pytest.mark.parametrize("ahead", [0, 50], ids=["the slow one behind", "the slow one ahead"])
def test_S3_nobody_fires_while_one_rank_makes_progress(start: Start, ahead: int) -> None:
    slow = f"{STEPS}\nfor part in range({ahead}): watchdog.progress('saving')\n"
    slow += "for part in range(14):\n    watchdog.progress(f'saving part {part}')\n    time.sleep(0.35)"
    waits = f"{STEPS}\nfor part in range(20): watchdog.progress('saved')\ntime.sleep(3.5)\nwatchdog.progress('step 3')"
    ranks = [start(slow, rank=0), start(waits, rank=1)]
    assert [rank.end(10) for rank in ranks] == [(0, ""), (0, "")]


def test_S3_a_rank_that_failed_is_named_and_one_that_ended_is_not(start: Start) -> None:
    start(STEPS, rank=1, world_size=3).end(10)
    failed = start(f"{STEPS}\nraise ValueError('a bug')", rank=2, world_size=3)
    assert failed.end(10)[0] == 1
    waiting = start(f"{STEPS}\nhang('step 2, update')", world_size=3)
    code, said = waiting.end(10)
    assert code == HANG
    assert verdict(said).startswith("HANG: rank 2 on") and "gone)" in verdict(said)
    assert "rank 1" not in verdict(said) and "(ended before: 1)" in verdict(said)


def test_S3_a_rank_that_waits_for_ended_ones_names_itself(start: Start) -> None:
    ends = start("step(1)\ntime.sleep(1.5)", rank=1)  # in its first step, whose limit is 10 s
    waits = start(f"{STEPS}\nhang('step 3, update')")
    assert ends.end(10) == (0, "")
    assert waits.process.poll() is None
    code, said = waits.end(TIMEOUT + LATEST)
    assert code == HANG
    assert verdict(said).startswith("HANG: rank 0 on") and "(ended before: 1)" in verdict(said)


def test_S3_slow_steps_raise_the_limit_to_four_of_them(start: Start) -> None:
    body = f"{STEPS}\ntime.sleep(0.4)\nwatchdog.progress('step 3')\ntime.sleep(1.2)\nwatchdog.progress('step 4')"
    assert start(f"{body}\ntime.sleep(2.5)", world_size=1, timeout=0.5).end(10) == (0, "")
    rank = start(f"{STEPS}\ntime.sleep(0.4)\nhang('step 3')", world_size=1, timeout=0.5)
    began = rank.hangs_since()
    assert rank.end(10)[0] == HANG
    detected(began, limit=4 * 0.45)


def test_S3_the_start_and_the_first_step_may_take_ten_times_as_long_and_count_for_no_limit(start: Start) -> None:
    body = "time.sleep(0.7)\nstep(1)\ntime.sleep(0.7)\nwatchdog.progress('step 1, update')\ntime.sleep(0.7)\n"
    rank = start(f"{body}step(2)\nhang('step 3')", world_size=1, timeout=0.2)
    began = rank.hangs_since()
    assert rank.end(10)[0] == HANG
    detected(began, limit=0.2)
    rank = start("hang('step 1')", world_size=1, timeout=0.2)
    began = rank.hangs_since()
    assert rank.end(10)[0] == HANG
    detected(began, limit=2.0)


def test_S3_without_a_timeout_nobody_fires(start: Start) -> None:
    body = f"{STEPS}\ntime.sleep(2.5)"
    assert start(body, timeout=0).end(10) == (0, "")


def test_S3_nobody_reading_stderr_does_not_keep_a_hung_rank(start: Start) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    assert fcntl.fcntl(writing, fcntl.F_GETFL) & os.O_NONBLOCK == 0
    rank = start(f"{STEPS}\nhang('step 3')", world_size=1, timeout=0.5, stderr=writing)
    began = rank.hangs_since()
    assert rank.process.wait(timeout=10) == HANG
    detected(began, limit=0.5 + 1.0)  # and its last words
    os.close(reading)
    os.close(writing)


FULL = """
import errno
def pwrite(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
os.pwrite = pwrite
"""
CUT = "pwrite = os.pwrite\nos.pwrite = lambda file, data, offset: pwrite(file, data[:100], offset)"


@pytest.mark.parametrize("fault", [FULL, CUT], ids=["full", "cut short"])
def test_S3_a_heartbeat_that_cannot_be_written_is_told_once_and_ends_nobody(start: Start, fault: str) -> None:
    busy = f"{STEPS}\nfor number in range(3, 43): step(number)"
    unseen, other = start(busy, rank=0, before=fault), start(busy, rank=1)
    code, said = unseen.end(10)
    assert code == 0
    assert said.count("\n") == 1 and "No space left on device" in said
    assert other.end(10) == (0, "")


def test_S3_heartbeats_fail_from_the_start_and_a_hang_is_found_all_the_same(start: Start, tmp_path: Path) -> None:
    (tmp_path / "heartbeats").write_text("a file where the folder should be")
    rank = start(f"{STEPS}\nhang('step 3')")
    began = rank.hangs_since()
    code, said = rank.end(10)
    assert code == HANG
    assert said.count(str(tmp_path / "heartbeats")) == 1
    assert verdict(said).startswith("HANG: rank 0 on")
    detected(began)


def test_S3_a_file_system_that_never_answers_ends_nobody_and_hides_no_hang(start: Start) -> None:
    stuck = "os.open = lambda *_: time.sleep(60)"
    busy = f"{STEPS}\nfor number in range(3, 53): step(number)"
    assert start(busy, world_size=1, before=stuck).end(10) == (0, "")
    rank = start(f"{STEPS}\nhang('step 3')", world_size=1, before=stuck)
    began = rank.hangs_since()
    assert rank.end(10)[0] == HANG
    detected(began)


def test_S3_the_folder_vanishes_during_the_run(start: Start, tmp_path: Path) -> None:
    remove = f"import shutil; shutil.rmtree({str(tmp_path / 'heartbeats')!r})"
    body = f"{STEPS}\ntime.sleep(0.3)\n{remove}\nfor number in range(3, 33): step(number)"
    code, said = start(body, world_size=1).end(10)
    assert code == 0
    assert said.count("\n") == 1 and "No such file or directory" in said


def test_S3_files_of_an_earlier_launch_say_nothing(start: Start, tmp_path: Path) -> None:
    """Nor do those of ranks that this launch has no more; a rank that never starts has ten time-outs to do so."""
    for rank in (1, 2):
        watchdog = Watchdog(tmp_path / "heartbeats", "earlier", rank, 3, 0.0, lambda: True)
        with watchdog, pytest.raises(KeyError):
            raise KeyError
    report = "assert not watchdog.stop_elsewhere()"
    rank = start(f"{STEPS}\nprint(time.monotonic(), flush=True)\n{report}\nhang('step 3')", timeout=0.2)
    began = rank.hangs_since()
    code, said = rank.end(10)
    assert code == HANG
    assert verdict(said).startswith("HANG: rank 1 has not been heard of since the start, 2.")
    detected(began, limit=1.8)


def test_the_heartbeat_file_is_rewritten_in_place(tmp_path: Path) -> None:
    """So it needs no space on a disk that has become full."""
    path = tmp_path / "rank-00000.json"
    with Watchdog(tmp_path, "this", 0, 1, 1000.0, lambda: False) as watchdog:
        seen = []
        for turn in range(3):
            watchdog.progress(f"step {turn}, " + "\N{GRINNING FACE}" * 1000)
            time.sleep(1.1)
            status = path.stat()
            seen.append((status.st_ino, status.st_size, status.st_blocks))
            record = json.loads(path.read_text())["heartbeat"]
            assert record["counter"] == turn + 1 and record["doing"].startswith(f"step {turn}, ")
            assert record["beats"] > turn and 0 <= record["age"] <= 1.2 and not record["ended"]
        assert len(set(seen)) == 1
        watchdog.alive("saving")  # a sign of life, but none that brings this rank ahead of the others
        time.sleep(1.1)
        record = json.loads(path.read_text())["heartbeat"]
        assert (record["counter"], record["doing"]) == (3, "saving") and record["age"] <= 1.2
    beats, record = record["beats"], json.loads(path.read_text())["heartbeat"]
    assert record["ended"] and record["beats"] > beats  # which is what makes readers look
    assert record["pid"] == os.getpid() and record["launch"] == "this"
    assert path.stat().st_mode & 0o022 == 0


@contextmanager
def listening(folder: Path, launch: str = "this") -> Iterator[Callable[[], bool]]:
    """A rank that hears, within 0.15 s, whether rank 0 was asked to stop."""
    with Watchdog(folder, launch, 1, 2, 0.0, lambda: False) as watchdog:

        def hears() -> bool:
            end = time.monotonic() + 0.15
            while not watchdog.stop_elsewhere() and time.monotonic() < end:
                time.sleep(0.01)
            return watchdog.stop_elsewhere()

        yield hears


def test_S1_a_request_to_stop_is_heard_by_the_other_ranks_within_two_beats(tmp_path: Path) -> None:
    asked = threading.Event()
    speaker = Watchdog(tmp_path, "this", 0, 2, 5000.0, asked.is_set)
    listener = Watchdog(tmp_path, "this", 1, 2, 5000.0, lambda: False)
    with speaker, listener:
        time.sleep(1.5)
        assert not listener.stop_elsewhere()
        asked.set()
        began = time.monotonic()
        while not listener.stop_elsewhere():
            assert time.monotonic() - began < 2.2
            time.sleep(0.01)
        assert not speaker.stop_elsewhere()


def test_a_damaged_record_is_never_believed_and_the_one_before_stays(tmp_path: Path) -> None:
    with Watchdog(tmp_path, "this", 0, 2, 0.0, lambda: True):
        time.sleep(0.1)
    path = tmp_path / "rank-00000.json"
    good = path.read_bytes()
    digit = good.index(b'"pid": ') + len(b'"pid": ')
    wrong = bytes([good[digit] ^ 1])
    damaged = [b"", good[:1], good[:60], good[: len(good.rstrip()) - 1], b"\0" * len(good), b"\xff\xfe", b"[1, 2]"]
    damaged += [
        good[:digit] + wrong + good[digit + 1 :],
        b"[" * 4096,
        b'{"crc32": 1}',
        good.replace(b"doing", b"being"),
    ]
    for bytes_ in damaged:
        path.write_bytes(bytes_)
        with listening(tmp_path) as hears:
            assert not hears(), bytes_
    path.write_bytes(good)
    with listening(tmp_path, "another") as hears:
        assert not hears()
    with listening(tmp_path) as hears:
        assert hears()
        path.write_bytes(good[:60])
        time.sleep(1.2)
        assert hears()
