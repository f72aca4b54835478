"""Ranks in reserve: what one becomes, and that none outlives its supervisor."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megasparse.training.supervisor import Spares, send

SHOWS = """
import json, os, sys
print(json.dumps([__name__, sys.argv[1:], dict(os.environ), sys.stdin.read(), sorted(sys.modules), os.getpid()]))
"""


@pytest.mark.slow
def test_a_rank_in_reserve_becomes_the_rank_of_its_environment(tmp_path, capfd):
    """Everything imported, and nothing left of its wait: as a process started with that environment."""
    (tmp_path / "script.py").write_text(SHOWS)
    spares = Spares([sys.executable, str(tmp_path / "script.py"), "--a", "b"])
    assert spares.take() is None and not spares.full()
    spares.fill(2)
    assert spares.full()
    spare, environment = spares.take(), {"PATH": os.environ["PATH"], "RANK": "1"}
    assert spare is not None and not spares.full()
    send(spare, environment)
    assert spare.wait(300) == 0
    name, arguments, found, read, modules, pid = json.loads(capfd.readouterr().out)
    assert (name, arguments, found, read, pid) == ("__main__", ["--a", "b"], environment, "", spare.pid)
    assert {"torch", "deepspeed", "megasparse.runs.pretraining"} <= set(modules)
    (other,) = spares._waiting
    spares.end()
    assert other.returncode == -9 and spares.take() is None


def test_a_rank_in_reserve_that_has_died_is_not_taken(monkeypatch):
    spares = Spares(["python", "-m", "megasparse", "pretrain"])
    monkeypatch.setattr(spares, "_command", [sys.executable, "-c", "pass"])
    spares.fill(1)
    spares._waiting[0].wait()
    assert spares.take() is None


SUPERVISOR = """
import os, sys
from megasparse.training.supervisor import Spares
spares = Spares([sys.executable, sys.argv[1]])
spares.fill(1)
print(spares._waiting[0].pid, flush=True)
os._exit(9)
"""


@pytest.mark.slow
def test_a_rank_in_reserve_ends_with_its_supervisor(tmp_path):
    (tmp_path / "script.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "script.py")]
    ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=300)
    pid, deadline = int(ended.stdout), time.monotonic() + 300
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (tmp_path / "ran").exists()
