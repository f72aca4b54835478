"""Two runs are never in one folder: the second is refused before it writes, and whoever has died keeps nobody out."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from megasparse.errors import ConfigError, UserError
from megasparse.files import LOCK_FILE, FileLock, JsonLines
from megasparse.settings.load import build_config
from megasparse.training.ranks import Ranks
from megasparse.training.run import run_lock
from tests.helpers.cases import together
from tests.helpers.ranks_in_threads import run_in_threads
from tests.helpers.run_ranks import ROOT
from tests.helpers.trained import prepared, trained

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from megasparse.training.run import run_lock
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
    result = [folder, *folder.rglob("*")]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in result}


def test_a_second_run_is_rejected_in_one_line_before_it_writes(tmp_path, capsys):
    run, data = tmp_path / "run", prepared(tmp_path)
    trained(data, run, ["local"], 2)
    with run_lock(run, Ranks()):
        before = contents(run)
        capsys.readouterr()
        with pytest.raises(SystemExit) as refused:
            trained(data, run, ["local"], 3)
        assert contents(run) == before
    assert refused.value.code == 2
    said = capsys.readouterr().err
    line = said.splitlines()[-1]
    assert said.count("error") == 1 and "Traceback" not in said
    holder = rf"host {re.escape(socket.gethostname())}, pid {os.getpid()}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\S*"
    assert re.fullmatch(
        rf"error: run\.directory: {re.escape(str(run))} is in use by another run \({holder}\)\. "
        r"Choose another run\.directory, or stop that run first",
        line,
    )
    assert [row["step"] for row in trained(data, run, ["local"], 3)] == [1, 2, 3]


def test_a_killed_run_releases_the_folder_though_its_children_live(tmp_path):
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
            text = (tmp_path / LOCK_FILE).read_text()
            assert text.startswith(f"host {socket.gethostname()}, pid {os.getpid()}, since ")
    finally:
        process.kill()
        process.wait()
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_all_ranks_of_a_job_hold_the_folder_and_all_are_rejected_together(tmp_path):
    def work(ranks: Ranks) -> None:
        with run_lock(tmp_path, ranks):
            ranks.gather(None)  # all of them are inside

    assert run_in_threads(work, 3) == [None] * 3
    with run_lock(tmp_path, Ranks()):
        errors = run_in_threads(work, 3)
    assert {type(error) for error in errors} == {ConfigError} and len({str(error) for error in errors}) == 1
    assert run_in_threads(work, 3) == [None] * 3


@pytest.mark.parametrize("problem", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_prints_a_warning_and_the_run_continues(tmp_path, monkeypatch, capsys, problem):
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(problem, os.strerror(problem))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with ExitStack() as both:
        for _ in range(2):
            both.enter_context(run_lock(tmp_path, Ranks()))
            warning = f"warning: {tmp_path / LOCK_FILE} cannot be locked ({os.strerror(problem)}): a second run"
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(warning)


@together("text", [b"", b"two\nlines", b"\x1b[2J", b"\xff\0"])
def test_the_lock_file_is_quoted_only_if_it_is_one_line(tmp_path, text):
    with run_lock(tmp_path, Ranks()):
        (tmp_path / LOCK_FILE).write_bytes(text)
        with pytest.raises(UserError) as refused, run_lock(tmp_path, Ranks()):
            pass
    assert f"(not named in {tmp_path / LOCK_FILE})" in str(refused.value)


@together("name", [".lock", "config.json", "metrics.jsonl", "events.jsonl"])
@together("kind", ["pipe", "link", "dangling link", "hard link"])
def test_a_planted_link_or_pipe_is_rejected_and_nothing_written_through_it(tmp_path, name, kind):
    target, path = tmp_path / "target", tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    if is_file := kind in ("link", "hard link"):
        target.write_text("{}\n")
    {"pipe": os.mkfifo, "hard link": partial(os.link, target)}.get(kind, partial(os.symlink, target))(path)
    with pytest.raises(UserError, match=f"^run.directory: {path} is a link or not a"):
        run_lock(tmp_path / "run", Ranks()).__enter__()
    for write in (FileLock, lambda path: JsonLines(path, pytest.fail).append({})):
        with pytest.raises((OSError, pytest.fail.Exception), match=r"symbolic link|not a regular file|hard link"):
            write(path)
    assert target.exists() == is_file and (not is_file or target.read_text() == "{}\n")


def test_a_folder_that_cannot_be_made_is_rejected(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^run\.directory: .*file/run cannot be created or read \(Not a directory\)"):
        run_lock(tmp_path / "file" / "run", Ranks()).__enter__()


def test_object_storage_is_rejected_by_name():
    with pytest.raises(ConfigError, match=r'^run\.directory: "s3://bucket/run" is a URL: object storage can neither'):
        build_config({"run": {"directory": "s3://bucket/run"}}, [])
