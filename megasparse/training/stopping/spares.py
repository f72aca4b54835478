"""Ranks in reserve: processes that have imported everything and wait, so that a restart need not. No torch here."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress


class Spares:
    """The ranks in reserve for a command, which begins with the name of Python."""

    def __init__(self, command: list[str]):
        self._command = [sys.executable, "-m", "megasparse.runs.spare", *command[1:]]
        self._waiting: list[subprocess.Popen[bytes]] = []
        self._wanted = 0

    def full(self) -> bool:
        """Whether as many were started as `fill` was asked for, since the last was taken."""
        return 0 < self._wanted <= len(self._waiting)

    def fill(self, number: int) -> None:
        """Start what lacks to that number."""
        self._wanted = number
        while len(self._waiting) < number:
            started = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
            self._waiting.append(started)

    def take(self) -> "subprocess.Popen[bytes] | None":
        """One that lives, if there is any."""
        while self._waiting:
            spare = self._waiting.pop()
            if spare.poll() is None:
                return spare
        return None

    def end(self) -> None:
        """End those that wait."""
        while (spare := self.take()) is not None:
            with suppress(ProcessLookupError):
                os.killpg(spare.pid, signal.SIGKILL)
            spare.wait()


def send(spare: "subprocess.Popen[bytes]", environment: dict[str, str]) -> None:
    """Let a process in reserve become the rank of that environment."""
    assert spare.stdin is not None
    with suppress(BrokenPipeError), spare.stdin:  # it has died: its end is seen as that of any rank
        spare.stdin.write(json.dumps(environment).encode() + b"\n")
