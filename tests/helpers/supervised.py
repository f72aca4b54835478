"""A supervisor on toy scripts as ranks, in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300.0
"""Seconds after which a test has found a hang."""

WITH_CONSTANTS = """
import json, pathlib, runpy, sys
from megasparse.training import supervisor
file = pathlib.Path(sys.argv[2])
def clock():
    with open(f"{file}.looks", "a") as looks:
        looks.write(".")
    return float(file.read_text())
begin = supervisor.Supervisor.__init__
supervisor.Supervisor.__init__ = lambda self, *given: begin(self, *given, clock=clock)
for name, value in json.loads(sys.argv[1]).items():
    getattr(supervisor, name)
    setattr(supervisor, name, value)
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

TOY = """
import os, signal, subprocess, sys, time
from pathlib import Path
HERE, RANK = Path(__file__).parent, int(os.environ["RANK"])
CHECKPOINTS = HERE / "run" / "checkpoints"

def note(name, text=""):
    with open(HERE / f"{name}-{RANK}", "a") as file:
        file.write(f"{text}\\n")

def on_signals(act):
    def handle(signum, frame):
        note("signals", signal.Signals(signum).name)
        act(signum)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, handle)

def wait_for(name):
    while not (HERE / name).exists():
        time.sleep(0.01)

def save_and_end(after):
    def act(signum):
        wait_for(after)
        note("saved")
        sys.exit(0)
    on_signals(act)

def ready():
    note("started", os.getpid())

def sleep():
    while True:
        time.sleep(60)
"""


class Toy:
    """The script launch/supervise.py on a script of TOY and a few lines. A test turns its clock."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = folder / "config.json"
        self.config.write_text(
            json.dumps({"run": {"directory": str(folder / "run")}, "training": {"global_batch": 24}})
        )
        self.now = 0.0
        self._set_clock(0.0)

    def turn(self, seconds: float = 0.0) -> None:
        """Turn the supervisor's clock, and wait until it has acted on what was before."""
        self._set_clock(seconds)
        looks = self.folder / "clock.looks"
        enough = looks.stat().st_size + 4
        self.wait_until(lambda: looks.stat().st_size >= enough)

    def _set_clock(self, seconds: float) -> None:
        self.now += seconds
        (self.folder / "clock.tmp").write_text(str(self.now))
        (self.folder / "clock.tmp").rename(self.folder / "clock")

    def allow(self, name: str) -> None:
        """Let a rank go on that waits for `name`."""
        (self.folder / name).touch()

    def start(self, lines: str, *options: str, ignore: int | None = None, **constants: float) -> None:
        (self.folder / "toy.py").write_text(TOY + lines)
        script = [str(self.folder / "toy.py"), "--config", str(self.config)]
        clock = str(self.folder / "clock")
        values = {"FIRST_WAIT": 0.0, "LOOK": 1e9} | constants  # no ranks in reserve, which would import torch
        changed = [sys.executable, "-c", WITH_CONSTANTS, json.dumps(values), clock]
        with open(self.folder / "output.txt", "wb") as output:
            self.process = subprocess.Popen(
                [*changed, str(ROOT / "launch" / "supervise.py"), *options, *script],
                env=os.environ | {"SUPERVISED_TOY": str(self.folder), "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if ignore is None else lambda: signal.signal(ignore, signal.SIG_IGN),
            )

    def wait_for(self, name: str, ranks: int = 2) -> None:
        self.wait_until(lambda: all(self.notes(name, rank) for rank in range(ranks)))

    def wait_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not true():
            assert time.monotonic() < deadline and self.process.poll() is None, self.said()
            time.sleep(0.01)

    def signal(self, signum: int) -> None:
        """Send a signal as a terminal does: to the whole process group of the supervisor."""
        os.killpg(self.process.pid, signum)

    def wait(self) -> int:
        return self.process.wait(LIMIT)

    def wait_as_time_passes(self) -> int:
        """Wait for the end while a second of the clock passes every 10 ms."""
        deadline = time.monotonic() + LIMIT
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.said()
            self._set_clock(1.0)
            time.sleep(0.01)
        return self.process.returncode

    def run(self, lines: str, *options: str, **constants: float) -> int:
        self.start(lines, *options, **constants)
        return self.wait()

    def said(self) -> str:
        return (self.folder / "output.txt").read_text()

    def cause(self) -> str:
        """The last line."""
        return self.said().splitlines()[-1]

    def notes(self, name: str, rank: int) -> list[str]:
        path = self.folder / f"{name}-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def leftovers(self) -> list[int]:
        """Processes, zombies not counted, that have inherited the environment."""
        mark = f"SUPERVISED_TOY={self.folder}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def end(self) -> None:
        for pid in self.leftovers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if hasattr(self, "process"):
            self.process.wait()
