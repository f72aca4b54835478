"""Requests to stop or to trace: signals, and the exit of the launcher that started this rank.

A thread receives them, because the main thread may wait in a collective for minutes and runs no Python handler there.
Python's C handler writes one byte per signal into a socket (Windows supports no pipe), which the thread reads.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from megasparse.errors import write_error
from megasparse.system import after_fork_in_child, process_status

USR1: int | None = getattr(signal, "SIGUSR1", None)  # not on Windows
USR2: int | None = getattr(signal, "SIGUSR2", None)
STOPPING = (signal.SIGTERM, signal.SIGINT, *([USR1] if USR1 else []))
ONE_REQUEST = 0.5
"""Seconds within which further signals are the same request: launchers send SIGINT and SIGTERM 0.1 s apart."""
POLL = 0.5
PR_SET_PDEATHSIG = 1


class StopSignals:
    """Handler of SIGTERM, SIGINT and SIGUSR1: the training loop reads `reason`, saves and stops.

    A second SIGTERM or SIGINT, at least 0.5 s after the first, ends the process immediately with exit code 128 +
    its number; SIGUSR1 does not. SIGUSR2 prints the stacks of all threads and requests a trace. Must be constructed
    on the main thread. clock: a monotonic clock in seconds.
    """

    reason: str | None = None
    """Reason to stop ("SIGTERM", "the launcher ended"), if any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parent = os.getppid()
        self._trace = threading.Event()
        self._reported = threading.Lock()
        arrived, self._arriving = socket.socketpair()
        self._arriving.setblocking(False)
        signal.set_wakeup_fd(self._arriving.fileno(), warn_on_full_buffer=False)
        after_fork_in_child(_forget)
        threading.Thread(target=self._listen, args=(arrived,), name="stop signals", daemon=True).start()
        for number in STOPPING:
            signal.signal(number, self._handle)
        if USR2:
            signal.signal(USR2, lambda *_: None)  # Python's own handler writes the byte
            faulthandler.register(USR2, file=2, all_threads=True, chain=True)

    def follow_launcher(self) -> None:
        """Stop when the launcher exits, even by SIGKILL. DeepSpeed starts ranks through a process that outlives the
        `deepspeed` command, so the command is followed too.
        """
        if "RANK" not in os.environ:
            return
        with suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(USR1 or 0))
        if os.getppid() != self._parent:  # the launcher exited before prctl
            self._ask("the launcher ended")
            return
        with suppress(OSError):
            if b"deepspeed.launcher.launch" in Path(f"/proc/{self._parent}/cmdline").read_bytes().split(b"\0"):
                command = process_status("PPid", self._parent)
                threading.Thread(target=self._follow, args=(command,), name="launcher", daemon=True).start()

    def trace_wanted(self) -> bool:
        requested = self._trace.is_set()
        self._trace.clear()
        return requested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or self._why(number)

    def _listen(self, arrived: socket.socket) -> None:
        first = None
        while True:
            number = arrived.recv(1)[0]
            if number in STOPPING:
                self._ask(self._why(number))
            if number == USR2:
                self._trace.set()
            if number in (signal.SIGTERM, signal.SIGINT):
                now = self._clock()
                first = now if first is None else first
                if now - first >= ONE_REQUEST:
                    os._exit(128 + number)

    def _why(self, number: int) -> str:
        ended = number == USR1 and os.getppid() != self._parent
        return "the launcher ended" if ended else signal.Signals(number).name

    def _ask(self, why: str) -> None:
        self.reason = self.reason or why
        if self._reported.acquire(blocking=False):  # never released, so that it is reported once
            again = "; repeat it to exit immediately" if why in ("SIGTERM", "SIGINT") else ""
            write_error(f"{why}: saving and stopping after this step{again}")

    def _follow(self, command: str) -> None:
        with suppress(OSError):  # the launcher has exited: the kernel sends a signal
            while process_status("PPid", self._parent) == command:
                time.sleep(POLL)
            self._ask("the launcher ended")


def _forget() -> None:
    """Restore default signal handling in a forked child, which must not write into the parent's socket."""
    signal.set_wakeup_fd(-1)
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
