"""Two runs are never in one folder: the second is refused before it writes, and whoever has died keeps nobody out."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megasparse.config.load import build_config
from megasparse.errors import ConfigError, UserError
from megasparse.training.checkpoints import run_lock as run_lock_module
from megasparse.training.checkpoints.file_lock import FileLock
from megasparse.training.checkpoints.run_lock import LOCK, run_lock
from megasparse.training.ranks import Ranks
from megasparse.training.stopping import watchdog as watchdog_module
from megasparse.training.stopping.watchdog import Watchdog, boot_id
from tests.helpers.finetuning import ENCODER, launch, reviews
from tests.helpers.ranks_in_threads import run_in_threads
from tests.helpers.run_ranks import ROOT
from tests.helpers.trained import prepared, trained


def no_locks(descriptor: int, operation: int, problem: int = errno.ENOLCK) -> None:
    raise OSError(problem, os.strerror(problem))


HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from megasparse.training.checkpoints.run_lock import run_lock
from megasparse.training.ranks import Ranks
with run_lock(Path(sys.argv[1]), Ranks()):
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    print(started.pid, flush=True)
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(600)
"""
"""A run with a forked child and a started one, neither of which ends with it."""


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Path -> when it was last written, and its bytes."""
    found = [folder, *folder.rglob("*")]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in found}


def pretraining(folder: Path) -> Callable[[int], list[Any]]:
    data = prepared(folder)
    return lambda steps: trained(data, folder / "run", ["local"], steps)


def finetuning(folder: Path) -> Callable[[int], list[Any]]:
    table = reviews(folder / "train.csv", 24)
    return lambda steps: launch(folder / "run", table, model=ENCODER, training={"steps": steps})


@pytest.mark.parametrize("kind", [pretraining, finetuning])
def test_a_second_run_is_refused_in_one_line_before_it_writes(tmp_path, kind, capsys):
    run, start = tmp_path / "run", kind(tmp_path)
    start(2)
    with run_lock(run, Ranks()):
        before = contents(run)
        capsys.readouterr()
        with pytest.raises(SystemExit) as refused:
            start(3)
        assert contents(run) == before
    assert refused.value.code == 2
    said = capsys.readouterr().err
    line = said.splitlines()[-1]
    assert said.count("error") == 1 and "Traceback" not in said
    holder = rf"host {re.escape(socket.gethostname())}, pid {os.getpid()}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\S*"
    assert re.fullmatch(
        rf"error: run\.directory: {re.escape(str(run))} is in use by another run \({holder}\)\. "
        r"Choose another run\.directory, or end that run first",
        line,
    )
    assert [row["step"] for row in start(3)] == [1, 2, 3]


def test_a_killed_run_keeps_nobody_out_though_its_children_live(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    children: list[int] = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        children += [int(process.stdout.readline()) for _ in range(2)]
        with pytest.raises(UserError, match=f"pid {process.pid},"), run_lock(tmp_path, Ranks()):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        for child in children:
            os.kill(child, 0)  # it lives
        with run_lock(tmp_path, Ranks()):
            assert (tmp_path / LOCK).read_text().startswith(f"host {socket.gethostname()}, pid {os.getpid()}, since ")
    finally:
        process.kill()
        process.wait()
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_all_ranks_of_a_job_hold_the_folder_and_all_are_refused_together(tmp_path):
    def work(ranks: Ranks) -> None:
        with run_lock(tmp_path, ranks):
            ranks.gather(None)  # all of them are inside

    assert run_in_threads(work, 3) == [None] * 3
    with run_lock(tmp_path, Ranks()):
        errors = run_in_threads(work, 3)
    assert {type(error) for error in errors} == {UserError} and len({str(error) for error in errors}) == 1
    assert run_in_threads(work, 3) == [None] * 3


@pytest.mark.parametrize("problem", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of_and_the_run_goes_on(tmp_path, monkeypatch, capsys, problem):
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: no_locks(descriptor, operation, problem))
    with ExitStack() as both:
        for _ in range(2):
            both.enter_context(run_lock(tmp_path, Ranks()))
            warning = f"warning: {tmp_path / LOCK} cannot be locked ({os.strerror(problem)}): only heartbeats keep"
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(warning)


@pytest.mark.parametrize("text", [b"", b"two\nlines", b"\x1b[2J", b"\xff\0"])
def test_what_the_lock_file_says_is_shown_only_where_it_is_one_line(tmp_path, text):
    with run_lock(tmp_path, Ranks()):
        (tmp_path / LOCK).write_bytes(text)
        with pytest.raises(UserError) as refused, run_lock(tmp_path, Ranks()):
            pass
    assert f"({tmp_path / LOCK} does not say which)" in str(refused.value)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"^run\.directory: .*file/run cannot be made \(Not a directory\)"),
        run_lock(tmp_path / "file" / "run", Ranks()),
    ):
        pass


class Elsewhere:
    """A run on another machine, as this one sees it through a file server: its lock file, its heartbeats, its flock.

    Time stands still but for the sleeps of `run_lock`; after each of them the run does what `lives` says.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, boot: str = "another kernel"):
        self.folder, self.monkeypatch, self.now, self.boot = folder, monkeypatch, 0.0, boot
        self.lives: Callable[[float], None] = lambda now: None
        (folder / "heartbeats").mkdir(parents=True)
        self.watchdog = Watchdog(folder / "heartbeats", "there", 0, 1, 0.0, lambda: False, lambda: self.now)
        (folder / LOCK).write_text(f"host {socket.gethostname()}, pid {os.getpid()}, since yesterday")
        self.beat()
        monkeypatch.setattr(run_lock_module, "time", self)

    def beat(self) -> None:
        with self.monkeypatch.context() as patched:
            patched.setattr(watchdog_module, "boot_id", lambda: self.boot)
            self.watchdog.exchange()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.lives(self.now)


@pytest.mark.parametrize("flock", ["kept by the file server", "not shared between machines", "not supported"])
def test_a_run_on_another_machine_is_watched_until_it_gives_a_sign_or_has_vanished(
    tmp_path, monkeypatch, capsys, flock
):
    run = tmp_path / "run"
    there = Elsewhere(run, monkeypatch)
    kept = FileLock(run / LOCK) if flock == "kept by the file server" else None
    if flock == "not supported":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    before = contents(run)
    there.lives = lambda now: there.beat() if now == 5.0 else None
    with pytest.raises(UserError, match=rf"in use by another run \(host .*, pid {os.getpid()}, since yesterday\)"):
        run_lock(run, Ranks()).__enter__()
    assert there.now == 5.0
    assert contents(run).keys() == before.keys() and (run / LOCK).read_text().endswith("since yesterday")

    there.lives = lambda now: None
    with run_lock(run, Ranks()) as lock:
        assert there.now == 5.0 + run_lock_module.VANISHED
        assert "yesterday" not in (run / LOCK).read_text() and not lock.lost()
        assert "that run has vanished" in capsys.readouterr().err
        if flock != "not supported":
            with pytest.raises(BlockingIOError):
                FileLock(run / LOCK)
    assert sorted(path.name for path in run.iterdir()) == [LOCK, "heartbeats"]
    if kept is not None:
        kept.release()


@pytest.mark.parametrize("how", ["ended", "another's", "none", "torn"])
def test_nobody_is_waited_for_whose_heartbeat_does_not_say_that_it_may_live(tmp_path, monkeypatch, how):
    there = Elsewhere(tmp_path, monkeypatch)
    beat = tmp_path / "heartbeats" / "rank-00000.json"
    if how == "ended":
        there.watchdog._write(replace(there.watchdog._own(), ended=True, boot="another kernel"))
    elif how == "another's":
        (tmp_path / LOCK).write_text("host elsewhere, pid 1, since yesterday")
    elif how == "none":
        beat.unlink()
    else:
        beat.write_bytes(beat.read_bytes()[:100])
    with run_lock(tmp_path, Ranks()):
        assert there.now == 0.0


def test_on_one_machine_the_kernel_decides_at_once(tmp_path, monkeypatch):
    there = Elsewhere(tmp_path, monkeypatch, boot=watchdog_module.boot_id())
    with run_lock(tmp_path, Ranks()), pytest.raises(UserError, match="in use"), run_lock(tmp_path, Ranks()):
        pass
    assert there.now == 0.0


def test_a_run_that_had_only_seemed_dead_ends_when_it_comes_back(tmp_path, monkeypatch, capfd):
    """It was stopped for longer than half a minute, say, and its folder was taken over."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    (tmp_path / "heartbeats").mkdir()
    with run_lock(tmp_path, Ranks()) as first:
        watchdog = Watchdog(tmp_path / "heartbeats", "first", 0, 1, 0.0, lambda: False, lost=first.lost)
        watchdog.exchange()
        there = Elsewhere.__new__(Elsewhere)
        assert not first.lost() and not ended
        monkeypatch.setattr(watchdog_module, "boot_id", lambda: "another kernel")
        watchdog.exchange()
        monkeypatch.setattr(watchdog_module, "boot_id", boot_id)
        there.now, there.lives = 0.0, lambda now: None
        monkeypatch.setattr(run_lock_module, "time", there)
        with run_lock(tmp_path, Ranks()) as second:
            assert first.lost() and not second.lost()
            watchdog.exchange()
    assert ended == [2]
    assert f"another run has taken over {tmp_path}" in capfd.readouterr().err


def test_object_storage_is_refused_by_name():
    with pytest.raises(ConfigError, match=r'^run\.directory: "s3://bucket/run" is a URL: object storage can neither'):
        build_config({"run": {"directory": "s3://bucket/run"}}, [])


def test_storage_that_takes_nothing_is_left_to_whoever_writes_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", no_locks)

    def full(self: Path, *arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "touch", full)
    with run_lock(tmp_path, Ranks()) as lock:
        assert not lock.lost()
    assert "only heartbeats" in capsys.readouterr().err
