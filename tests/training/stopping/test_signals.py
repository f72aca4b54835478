"""Stop requests, in separate processes whose clock moves only by the test."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from megasparse.training.stopping.signals import ONE_REQUEST

ROOT = Path(__file__).parents[3]
LIMIT = 120.0
"""Seconds after which a test has found a hang."""

RANK = """
import os, sys, time
from pathlib import Path
from megasparse.training.stopping.signals import StopSignals
folder = Path(sys.argv[1])
def clock():
    now = float((folder / "clock").read_text()) if (folder / "clock").exists() else 0.0
    with open(folder / "looks", "a") as looks:
        looks.write(".")
    return now
signals = StopSignals(clock)
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)
{before}
signals.follow_launcher()
(folder / "ready.tmp").write_text(str(os.getpid()))
(folder / "ready.tmp").rename(folder / "ready")
while signals.reason is None:
    {turn}
{after}
(folder / "wanted.tmp").write_text(str(signals.reason))
(folder / "wanted.tmp").rename(folder / "wanted")
"""


def script(before: str = "", turn: str = "time.sleep(0.02)", after: str = "") -> str:
    return RANK.format(before=before, turn=turn, after=after)


def environment(**values: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if key != "RANK"}
    return clean | {"PYTHONPATH": str(ROOT)} | values


def start(folder: Path, code: str, **values: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**values),
    )
    wait_for((folder / "ready").exists)
    return process


def turn_clock(folder: Path, now: float) -> None:
    (folder / "clock.tmp").write_text(str(now))
    (folder / "clock.tmp").rename(folder / "clock")


def looks_at_clock(folder: Path) -> int:
    return len((folder / "looks").read_text()) if (folder / "looks").exists() else 0


def read_until(stream: IO[str] | None, word: str) -> None:
    """Read lines up to the one with `word`."""
    assert stream is not None
    while word not in stream.readline():
        pass


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + LIMIT
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return met


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_is_noted_and_the_process_ends_by_itself(tmp_path, number):
    rank = start(tmp_path, script(after="time.sleep(0.3)"))
    rank.send_signal(number)
    _, said = rank.communicate(timeout=LIMIT)
    assert rank.returncode == 0, said
    assert (tmp_path / "wanted").read_text() == number.name
    assert said.count("\n") == 1 and said.startswith(f"{number.name}: saving and stopping")


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_two_signals_within_half_a_second_are_one_and_a_later_one_exits_at_once(tmp_path, second):
    rank = start(tmp_path, script(after="wait_for('never')"))
    rank.send_signal(signal.SIGINT)
    assert wait_for(lambda: looks_at_clock(tmp_path) == 1)
    turn_clock(tmp_path, ONE_REQUEST - 0.01)
    rank.send_signal(signal.SIGTERM)
    assert wait_for(lambda: looks_at_clock(tmp_path) == 2)
    turn_clock(tmp_path, ONE_REQUEST)
    rank.send_signal(second)
    _, said = rank.communicate(timeout=LIMIT)
    assert rank.returncode == 128 + second
    assert said.count("saving and stopping") == 1


def test_sigusr1_is_not_counted_as_a_second_signal(tmp_path):
    rank = start(tmp_path, script(after="wait_for('saved')"))
    rank.send_signal(signal.SIGUSR1)
    read_until(rank.stderr, "SIGUSR1: saving and stopping")
    turn_clock(tmp_path, 2 * ONE_REQUEST)
    rank.send_signal(signal.SIGTERM)
    assert wait_for(lambda: looks_at_clock(tmp_path) == 1)
    turn_clock(tmp_path, 4 * ONE_REQUEST)
    rank.send_signal(signal.SIGUSR1)
    (tmp_path / "saved").touch()
    _, said = rank.communicate(timeout=LIMIT)
    assert rank.returncode == 0, said
    assert (tmp_path / "wanted").read_text() == "SIGUSR1"


def test_signals_are_heard_while_the_main_thread_is_deep_in_a_library(tmp_path):
    locked = "import ctypes; c = ctypes.CDLL(None); m = ctypes.create_string_buffer(64); c.pthread_mutex_lock(m)"
    rank = start(tmp_path, script(before=locked, turn="c.pthread_mutex_lock(m)"))  # which never comes back
    rank.send_signal(signal.SIGTERM)
    assert rank.stderr is not None and rank.stderr.readline().startswith("SIGTERM: saving and stopping")
    assert wait_for(lambda: looks_at_clock(tmp_path) == 1)
    turn_clock(tmp_path, ONE_REQUEST)
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(timeout=LIMIT) == 128 + signal.SIGTERM


def test_sigusr2_prints_the_stacks_and_asks_for_a_trace(tmp_path):
    traced = "(folder / 'traced').write_text(f'{signals.trace_wanted()} {signals.trace_wanted()}')"
    code = script(turn="waiting_for_data()", after=traced)
    rank = start(tmp_path, "def waiting_for_data():\n    time.sleep(1)\n" + code)
    rank.send_signal(signal.SIGUSR2)
    read_until(rank.stderr, "in waiting_for_data")
    rank.send_signal(signal.SIGTERM)
    rank.communicate(timeout=LIMIT)
    assert (tmp_path / "wanted").read_text() == "SIGTERM" and (tmp_path / "traced").read_text() == "True False"


def test_a_forked_child_takes_signals_for_itself(tmp_path):
    fork = "child = os.fork()\nif child == 0:\n    (folder / 'forked').touch()\n    time.sleep(20)\n"
    fork += "(folder / 'child').write_text(str(child))"
    turn = "time.sleep(0.5); (folder / 'status').write_text(str(os.waitpid(child, 0)[1])); break"
    rank = start(tmp_path, script(before=fork, turn=turn))
    assert wait_for((tmp_path / "forked").exists)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGTERM)
    assert rank.wait(timeout=LIMIT) == 0
    assert os.WTERMSIG(int((tmp_path / "status").read_text())) == signal.SIGTERM
    assert (tmp_path / "wanted").read_text() == "None"


LAUNCHER = """
import os, subprocess, sys
sys.exit(subprocess.call(sys.argv[1:], env=os.environ | {"RANK": "0"}))
"""


@pytest.mark.parametrize("late", [False, True], ids=["while following", "before following"])
def test_the_launcher_is_killed(tmp_path, late):
    before = "(folder / 'ready').touch()\nwhile not (folder / 'killed').exists(): time.sleep(0.02)" if late else ""
    command = [sys.executable, "-c", LAUNCHER, sys.executable, "-c", script(before=before), str(tmp_path)]
    launcher = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE)
    assert wait_for((tmp_path / "ready").exists)
    launcher.kill()
    launcher.wait()
    (tmp_path / "killed").touch()
    assert wait_for((tmp_path / "wanted").exists)
    assert (tmp_path / "wanted").read_text() == "the launcher ended"


@pytest.mark.slow
def test_the_deepspeed_command_is_killed_and_its_launcher_lives_on(tmp_path):
    folder = tmp_path / "packages" / "deepspeed" / "launcher"
    folder.mkdir(parents=True)
    for init in (folder / "__init__.py", folder.parent / "__init__.py"):
        init.touch()
    (folder / "launch.py").write_text(LAUNCHER)
    rank = [sys.executable, "-c", script(), str(tmp_path)]
    module = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", *rank]
    command = [sys.executable, "-c", f"import subprocess; subprocess.call({module!r})"]
    top = subprocess.Popen(command, env=environment(PYTHONPATH=f"{tmp_path / 'packages'}:{ROOT}"))
    assert wait_for((tmp_path / "ready").exists)
    time.sleep(0.2)
    assert not (tmp_path / "wanted").exists()
    top.kill()
    top.wait()
    assert wait_for((tmp_path / "wanted").exists)
    assert (tmp_path / "wanted").read_text() == "the launcher ended"
