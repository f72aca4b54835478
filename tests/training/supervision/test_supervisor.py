"""The supervisor with toy scripts as ranks: what reaches them, what it leaves behind, when it starts them again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megasparse.errors import HANG, LOST_PEER, ConfigError
from megasparse.training import supervisor
from megasparse.training.supervisor import NodeLayout, Supervisor, supervised_config
from tests.helpers.supervised import Toy


def start_two(toy: Toy, lines: str, *options: str, **constants: float) -> None:
    """Start two ranks, and wait until both have begun."""
    toy.start(lines, "--ranks", "2", *options, **constants)
    toy.wait_for("started")


# Signals


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_reaches_each_rank_once_and_a_save_may_take_longer_than_any_limit(toy, name):
    start_two(toy, "save_and_end(f'save-{RANK}'); ready(); sleep()")
    toy.signal(signal.Signals[name])
    toy.allow("save-0")
    toy.wait_for("saved", ranks=1)
    toy.turn()  # its end is seen
    toy.turn(10_000.0)
    toy.wait_for("signals")
    toy.allow("save-1")
    assert toy.wait() == 0
    for rank in range(2):
        assert toy.notes("signals", rank) == [name]
        assert toy.notes("saved", rank), "killed in its save"


def test_two_signals_at_once_are_one_request(toy):
    start_two(toy, "save_and_end('save'); ready(); sleep()")
    toy.signal(signal.SIGINT)
    toy.wait_for("signals")
    toy.turn(supervisor.AGAIN - 0.1)
    toy.signal(signal.SIGTERM)  # DeepSpeed's launcher sends both, 0.1 s apart
    toy.turn()
    toy.allow("save")
    assert toy.wait() == 0
    assert [toy.notes("signals", rank) for rank in range(2)] == [["SIGINT"]] * 2


@pytest.mark.slow
def test_SIGTERM_after_SIGUSR1_still_lets_them_save(toy):
    lines = "on_signals(lambda n: None if n == signal.SIGUSR1 else (note('saved'), sys.exit(0)))"
    start_two(toy, f"{lines}\nready(); sleep()")
    toy.signal(signal.SIGUSR1)
    toy.wait_for("signals")
    toy.turn(supervisor.AGAIN)
    toy.signal(signal.SIGTERM)
    assert toy.wait() == 0
    assert [toy.notes("signals", rank) for rank in range(2)] == [["SIGUSR1", "SIGTERM"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_second_signal_ends_all_at_once(toy, name):
    """Rank 0 ends by itself; rank 1 does not even hear it."""
    lines = """
asked = []
on_signals(lambda n: os._exit(128 + n) if asked else asked.append(n))
if RANK == 1:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
ready(); sleep()
"""
    start_two(toy, lines, "--restarts", "3", LAST_WORDS=1e9)
    toy.signal(signal.Signals[name])
    toy.wait_for("signals", ranks=1)
    toy.turn(supervisor.AGAIN)
    toy.signal(signal.Signals[name])
    toy.wait_until(lambda: len(toy.notes("signals", 0)) == 2)
    assert toy.wait_as_time_passes() == 128 + signal.Signals[name]
    assert toy.notes("signals", 0) == [name, name] and len(toy.notes("started", 0)) == 1
    assert f"second {name}" in toy.cause()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_before_a_rank_can_handle_it_a_signal_is_no_failure(toy, name):
    start_two(toy, "ready(); sleep()", "--restarts", "3")
    toy.signal(signal.Signals[name])
    assert toy.wait() == 0
    assert len(toy.notes("started", 0)) == 1
    assert f"supervisor: stopped by {name} before training had begun" in toy.said()


@pytest.mark.slow
def test_a_rank_that_waits_for_one_ended_in_its_start_is_ended_too(toy):
    start_two(toy, "RANK and on_signals(lambda n: None)\nready(); sleep()")
    toy.signal(signal.SIGTERM)
    toy.wait_until(lambda: bool(toy.notes("signals", 1)))
    assert toy.wait_as_time_passes() == 0
    assert toy.notes("signals", 1) == ["SIGTERM"]


def test_a_save_that_fails_is_reported_and_not_tried_again(toy):
    start_two(toy, "on_signals(lambda n: sys.exit(3))\nready(); sleep()", "--restarts", "3")
    toy.signal(signal.SIGTERM)
    assert toy.wait() == 3
    assert len(toy.notes("started", 0)) == 1
    assert "exit code 3 (a checkpoint could not be written)" in toy.cause()


@pytest.mark.slow
def test_a_signal_before_a_restart_ends_the_supervisor(toy):
    toy.start("ready(); sys.exit(5)", "--restarts", "3", FIRST_WAIT=60.0)
    toy.wait_until(lambda: "starting again" in toy.said())
    toy.signal(signal.SIGTERM)
    assert toy.wait() == HANG
    assert len(toy.notes("started", 0)) == 1


# Death


WAITING = "on_signals(lambda n: None)\nready()\n"


def test_a_killed_rank_is_named_and_the_others_are_ended_stopped_ones_and_grandchildren_too(toy):
    lines = """
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
if RANK == 2:
    ready(); os.kill(os.getpid(), signal.SIGSTOP)
"""
    toy.start(lines + WAITING + "sleep()", "--ranks", "3")
    toy.wait_for("started", ranks=3)
    toy.wait_until(lambda: len(toy.leftovers()) == 7)  # a process that has just begun has no environment yet
    pid = int(toy.notes("started", 1)[0])
    os.kill(pid, signal.SIGKILL)
    assert toy.wait_as_time_passes() == 128 + signal.SIGKILL
    assert f"rank 1 (pid {pid}) was killed by SIGKILL; not by the kernel for want of memory" in toy.cause()
    assert toy.leftovers() == []


def test_all_is_over_within_5_seconds():
    assert supervisor.LAST_WORDS + supervisor.POLL <= 4 and supervisor.AT_ONCE <= 5


@pytest.mark.slow
def test_grandchildren_do_not_outlive_a_normal_end_either(toy):
    assert toy.run("subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])", "--ranks", "2") == 0
    assert toy.leftovers() == []


@pytest.mark.slow
def test_a_failed_start_leaves_no_rank_behind(toy, monkeypatch):
    started = []
    real = subprocess.Popen

    def popen(*args, **kwargs):
        if started:
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(real(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setenv("SUPERVISED_TOY", str(toy.folder))
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(BlockingIOError):
        Supervisor(command, NodeLayout(ranks=2), toy.folder)._run_once()
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.slow
def test_exit_codes_are_seen_where_SIGCHLD_is_ignored(toy):
    toy.start("sys.exit(3 * RANK)", "--ranks", "2", ignore=signal.SIGCHLD)
    assert toy.wait() == 3


@pytest.mark.slow
def test_a_rank_that_hangs_after_the_others_ended_well_is_named(toy):
    start_two(toy, f"{WAITING}\nif RANK == 1: sleep()")
    assert toy.wait_as_time_passes() == HANG
    assert f"rank 1 (pid {toy.notes('started', 1)[0]}) was still running 60 s after" in toy.cause()


@pytest.mark.slow
def test_a_rank_may_end_a_little_later_than_another(toy):
    toy.start("RANK and wait_for('end'); note('done')", "--ranks", "2")
    toy.wait_for("done", ranks=1)
    toy.turn()  # its end is seen
    toy.turn(supervisor.NORMAL_END - 1)
    toy.allow("end")
    assert toy.wait() == 0 and toy.notes("done", 1)


@pytest.mark.slow
def test_the_traceback_of_a_rank_is_followed_by_one_line_that_names_it(toy):
    toy.start(f"{WAITING}\nif RANK == 1: raise RuntimeError('of rank 1')\nsleep()", "--ranks", "2")
    toy.wait_until(lambda: "RuntimeError: of rank 1" in toy.said())
    assert toy.wait_as_time_passes() == 1
    said = toy.said().splitlines()
    assert said[0].startswith("Traceback") and said[-2] == "RuntimeError: of rank 1"
    assert f"rank 1 (pid {toy.notes('started', 1)[0]}) ended with exit code 1 (an error of the program)" in said[-1]
    assert sum("supervisor:" in line for line in said) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, words",
    [
        (2, "a mistake to correct"),
        (4, "training diverged"),
        (5, "the run hung"),
        (6, "it lost another rank"),
        (77, "exit code 77"),
    ],
)
def test_exit_codes_are_explained(toy, code, words):
    assert toy.run(f"sys.exit({code})") == code
    assert words in toy.cause()


@pytest.mark.slow
@pytest.mark.parametrize("end, code", [("sys.exit(1)", 1), ("os.kill(os.getpid(), signal.SIGSEGV)", 139)])
def test_a_rank_that_lost_another_is_not_the_cause(toy, end, code):
    assert toy.run(f"RANK or sys.exit(6)\ntime.sleep(0.2)\n{end}", "--ranks", "2") == code
    assert "rank 1 " in toy.cause()


@pytest.mark.slow
def test_a_lost_rank_of_another_node_is_the_cause_where_no_rank_here_has_another(toy):
    assert toy.run("sys.exit(6)", "--ranks", "2") == LOST_PEER
    assert "rank 0 " in toy.cause()


@pytest.mark.slow
def test_the_others_have_time_for_their_last_words(toy):
    lines = "RANK or sys.exit(1)\ntime.sleep(0.4)\nprint('last words'); sys.exit(6)"
    assert toy.run(lines, "--ranks", "2") == 1
    assert "last words" in toy.said()


# Restarts


MAY_GO = ["sys.exit(1)", "sys.exit(3)", "sys.exit(5)", "sys.exit(6)", "os.kill(os.getpid(), 9)"]
STAYS = {"sys.exit(2)": 2, "sys.exit(4)": 4}


@pytest.mark.slow
@pytest.mark.parametrize("end", [*MAY_GO, *STAYS])
def test_started_again_after_a_failure_that_this_may_fix_but_no_mistake_or_divergence(toy, end):
    once = f"ready()\nlen((HERE / 'started-0').read_text().split()) == 1 and {end}"
    assert toy.run(once, "--restarts", "3" if end in STAYS else "1") == STAYS.get(end, 0)
    assert len(toy.notes("started", 0)) == (1 if end in STAYS else 2)


@pytest.mark.slow
def test_not_started_again_unless_asked_to(toy):
    lines = "(CHECKPOINTS / '00000001').mkdir(parents=True); ready(); sys.exit(1)"
    assert toy.run(lines) == 1
    assert len(toy.notes("started", 0)) == 1
    assert "stopped" not in toy.said()


def test_failing_at_the_same_checkpoint_ends_after_the_limit_with_a_clear_message(toy):
    (toy.folder / "run" / "checkpoints" / "00000010").mkdir(parents=True)
    assert toy.run("ready(); sys.exit(5)", "--restarts", "2") == 5
    pids = toy.notes("started", 0)
    assert len(pids) == 3
    assert toy.cause() == (
        "supervisor: stopped: ended 3 times at the same checkpoint 00000010 without getting further; "
        f"the last cause: rank 0 (pid {pids[2]}) ended with exit code 5 (the run hung)"
    )


@pytest.mark.slow
def test_failing_before_the_first_checkpoint_ends_after_the_limit(toy):
    assert toy.run("ready(); sys.exit(1)", "--restarts", "2") == 1
    assert len(toy.notes("started", 0)) == 3
    assert "stopped: ended 3 times before the first checkpoint" in toy.cause()


@pytest.mark.slow
def test_a_new_checkpoint_sets_the_limit_back(toy):
    lines = """
ready()
start = len((HERE / 'started-0').read_text().split())
start <= 3 and (CHECKPOINTS / f"{start:08d}").mkdir(parents=True)
sys.exit(1)
"""
    assert toy.run(lines, "--restarts", "1") == 1
    assert len(toy.notes("started", 0)) == 4
    assert "stopped: ended 2 times at the same checkpoint 00000003" in toy.cause()


def in_process(monkeypatch, restarts: int) -> list[float]:
    """The seconds waited before each restart of a run that never gets anywhere."""
    waits: list[float] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(Supervisor, "_run_once", lambda self: (1, "a cause"))
    monkeypatch.setattr(Supervisor, "_wait", lambda self, seconds: waits.append(seconds))
    assert Supervisor([], NodeLayout(), Path("/nowhere"), restarts).run() == 1
    return waits


def test_the_wait_before_a_restart_doubles_up_to_half_a_minute(monkeypatch):
    assert in_process(monkeypatch, 7) == [1, 2, 4, 8, 16, 30, 30]


def test_storage_that_cannot_be_read_is_no_progress_and_no_crash(monkeypatch):
    def unreadable(directory):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(supervisor, "find_newest", unreadable)
    assert len(in_process(monkeypatch, 2)) == 2


@pytest.mark.slow
def test_a_checkpoint_chosen_by_hand_is_refused_with_restarts(toy):
    with pytest.raises(ConfigError, match=r"--resume never: every one of 3 restarts.* Leave out --restarts"):
        supervised_config(["--config", str(toy.config), "--resume", "never"], restarts=3)
    supervised_config(["--config", str(toy.config), "--resume", "never"])


def test_a_kill_by_the_kernel_for_want_of_memory_is_told_from_others():
    """By the count that /proc/vmstat has of them; the tests' machine may itself have any number."""
    counted = [
        int(line.split()[1]) for line in Path("/proc/vmstat").read_text().splitlines() if line[:9] == "oom_kill "
    ]
    assert [supervisor.oom_kills()] == (counted or [None])
    assert "machine was out of memory, and the kernel killed" in supervisor.killed_for_memory(2, 3)
    assert supervisor.killed_for_memory(3, 3).startswith("; not by the kernel")
    assert supervisor.killed_for_memory(None, 3) == "; was the machine out of memory?"
