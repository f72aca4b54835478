"""Watchdog that ends this process if no rank makes progress, and reports which rank is behind and its activity.

Ranks exchange heartbeats through the store of the process group, a server on the host of rank 0. A heartbeat contains
the seconds since its rank's last progress, by that rank's clock; its reader measures for how long it has not changed,
by its own clock. One thread exchanges heartbeats and another decides, because a store that does not answer can block
the first.
"""

import faulthandler
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from torch.distributed import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from megasparse.errors import HANG, write_error
from megasparse.system import process_status

STORE_FAILS = "the store on the host of rank 0 does not answer"
START = 10
"""Factor of the timeout during startup and the first step."""
GAPS = 4
"""The limit is at least this factor times the longest time without progress so far."""
NAMED = 8  # ranks in a verdict, at most
LAST_WORDS = 2.0
"""Seconds for printing the stacks; stderr may block."""


@dataclass(frozen=True)
class Heartbeat:
    """A rank's state, for the other ranks.

    beats: number of this heartbeat; constant if the process is stopped, dead, or cut off. counter: signs of progress so
    far; the rank with the fewest delays the others. age: seconds since the last one. stop: True if the rank should
    stop. limit: seconds without progress after which the rank is considered hanging.
    """

    rank: int
    host: str
    pid: int
    beats: int
    counter: int
    age: float
    doing: str
    stop: bool
    limit: float
    ended: bool


class Watchdog:
    """Context manager that ends this process if the run hangs. Call `watchdog.progress("step 3, ...")` in it.

    It fires when no rank has made progress for its limit: it prints one line that names the rank behind, prints the
    stacks of all threads, and exits with errors.HANG. While any rank makes progress (for example, saves), the others
    wait for it.

    If the main thread holds Python's lock, the watchdog cannot run. A timer of faulthandler then prints the stacks and
    exits with code 1, one second after the limit, or three if other ranks should report first.

    timeout: limit in seconds; 0 disables. Ten times as long until the second step starts, and at least four times the
    longest time between two calls of `progress` since then. clock: monotonic, in seconds.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        timeout: float,
        stop_wanted: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout, self._stop_wanted, self._clock = timeout, stop_wanted, clock
        # Each rank reads the heartbeats of all others, so thousands of ranks exchange them less often.
        self._period = min(max(0.5, world_size / 256), timeout / 20 or 0.5)
        self._host, self._began = socket.gethostname(), self._clock()
        self._latest = (0, self._began, "starting")  # counter, time, activity; replaced as one, so no lock is needed
        self._first_step: str | None = None
        self._longest: float | None = None  # None during the first step
        self._beats, self._answered = 0, self._began  # number of heartbeats, and the time of the store's last answer
        self._others: list[tuple[Heartbeat, float] | None] = [None] * world_size  # and the time we first read it
        self._over = threading.Event()
        self._exchange_thread = threading.Thread(target=self._exchange_all, name="heartbeats", daemon=True)
        self._decision_thread = threading.Thread(target=self._decide, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._exchange_thread.start()
        self._decision_thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._decision_thread.join(LAST_WORDS)
        faulthandler.cancel_dump_traceback_later()
        # A rank that fails writes no last heartbeat, so that ranks waiting for it can name it.
        if exception[1] is None:
            self._write_last(replace(self._heartbeat(), ended=True))

    def progress(self, doing: str) -> None:
        """Record progress, and the next activity. Main thread only; in step on all ranks."""
        self._note(doing, 1)

    def alive(self, doing: str) -> None:
        """Record activity that may differ between ranks, such as a block of a file. Main thread only."""
        self._note(doing, 0)

    def _note(self, doing: str, progress: int) -> None:
        counter, before, _ = self._latest
        now = self._clock()
        if self._longest is not None:
            self._longest = max(self._longest, now - before)
        elif step := re.match(r"step \d+", doing):
            self._first_step = self._first_step or step[0]
            if step[0] != self._first_step:
                self._longest = 0.0
                self._set_timer(self._timeout)  # now, not at the next check
        self._latest = (counter + progress, now, doing)

    def stop_elsewhere(self) -> bool:
        """True if another rank of this launch received a request to stop."""
        return any(entry[0].stop for entry in self._others if entry)

    def _heartbeat(self) -> Heartbeat:
        counter, when, doing = self._latest
        limit = START * self._timeout if self._longest is None else max(self._timeout, GAPS * self._longest)
        return Heartbeat(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            beats=self._beats,
            counter=counter,
            age=self._clock() - when,
            doing=doing[:200],
            stop=self._stop_wanted(),
            limit=limit,
            ended=False,
        )

    def _exchange_all(self) -> None:
        while self._store is not None:
            try:
                self.exchange(self._store)
            except RuntimeError as error:  # torch's DistNetworkError: it never connects again
                if not self._over.is_set():
                    write_error(f"rank {self._rank}: {STORE_FAILS} ({str(error).splitlines()[0]}). Training continues")
                return
            if self._over.wait(self._period):
                return

    def exchange(self, store: Store) -> None:
        self._write(store, self._heartbeat())
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        started = [rank for rank in others if self._others[rank] or store.check([str(rank)])]
        for line in store.multi_get(list(map(str, started))):
            beat = Heartbeat(**json.loads(line))
            entry = self._others[beat.rank]
            if entry is None or entry[0].beats < beat.beats:
                self._others[beat.rank] = (beat, self._clock())
        self._answered = self._clock()

    def _write(self, store: Store, heartbeat: Heartbeat) -> None:
        self._beats += 1
        store.set(str(self._rank), json.dumps(asdict(replace(heartbeat, beats=self._beats))))

    def _write_last(self, heartbeat: Heartbeat) -> None:
        self._over.set()
        self._exchange_thread.join(LAST_WORDS / 4)
        if self._store is not None and not self._exchange_thread.is_alive():  # else the store would block this one too
            with suppress(RuntimeError):
                self._write(self._store, heartbeat)

    def _decide(self) -> None:
        while self._timeout:
            self._set_timer(self._heartbeat().limit)
            if line := self.hang():
                self._give_up(line)
            if self._over.wait(self._period):
                return

    def hang(self) -> str | None:
        """Return the line that names the hanging ranks; None while any rank makes progress."""
        local, now = self._heartbeat(), self._clock()
        starting = now - self._began < START * self._timeout
        for rank, entry in enumerate(self._others):
            if entry is None:
                if rank != self._rank and starting:
                    return None
            elif not entry[0].ended and entry[0].age < entry[0].limit and now - entry[1] < local.limit:
                return None  # a silent rank is judged by the local limit: its last heartbeat may be from its first step
        return self._verdict(local) if local.age >= local.limit else None

    def _set_timer(self, limit: float) -> None:
        """Start the timer of faulthandler's C thread, which does not need the GIL. Other ranks report first."""
        if self._timeout and not self._over.is_set():
            faulthandler.dump_traceback_later(limit + (3 if self._world_size > 1 else 1), exit=True, file=2)

    def _give_up(self, line: str) -> None:
        threading.Timer(LAST_WORDS, os._exit, [HANG]).start()
        write_error(line)
        faulthandler.dump_traceback(file=2, all_threads=True)
        self._write_last(self._heartbeat())  # else the other ranks would take its silence for the cause
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(HANG)

    def _verdict(self, local: Heartbeat) -> str:
        """Name the ranks behind: those that never reported, else those now silent, else those with least progress."""
        now = self._clock()
        heard = [(local, 0.0)] + [(entry[0], now - entry[1]) for entry in self._others if entry]
        unheard = [r for r in range(self._world_size) if r != self._rank and self._others[r] is None]
        alive = [(beat, silence) for beat, silence in heard if not beat.ended]
        least = min(beat.counter for beat, _ in alive)
        silent = [(beat, silence) for beat, silence in alive if silence >= local.limit]
        behind = silent or [(beat, silence) for beat, silence in alive if beat.counter == least]
        culprits = [f"rank {r} has not been heard of since the start, {now - self._began:.1f} s ago" for r in unheard]
        culprits = culprits or [self._describe(beat, silence, local.limit) for beat, silence in behind]
        if self._store is not None and now - self._answered >= local.limit:
            culprits = [f"{STORE_FAILS}: it is stopped, gone or cut off from this one"]
        more = f" and {len(culprits) - NAMED} more" if len(culprits) > NAMED else ""
        ended = [beat.rank for beat, _ in heard if beat.ended]
        endings = f" (ended before: {', '.join(map(str, ended[:NAMED]))})" if ended else ""
        even = len(behind) == self._world_size > 1 and not silent
        hint = " (no rank is behind the others: is the network between them down?)" if even else ""
        return (
            f"HANG: {'; '.join(culprits[:NAMED])}{more}{endings}{hint}. "
            f'Rank {local.rank}, at "{local.doing}" for {local.age:.1f} s, ends with exit code {HANG}; '
            f"its stacks follow (limit {local.limit:g} s, run.hang_timeout={self._timeout:g})"
        )

    def _describe(self, beat: Heartbeat, silence: float, limit: float) -> str:
        state = f", {_state(beat.pid)}" if beat.host == self._host else ""
        name = f"rank {beat.rank} on {beat.host} (pid {beat.pid}{state})"
        if silence >= limit:
            return f'{name} has been silent for {silence:.1f} s, before that at "{beat.doing}" for {beat.age:.1f} s'
        return f'{name} has been at "{beat.doing}" for {beat.age + silence:.1f} s'


def connect(launch: str) -> Store:
    """Connect to the store of the process group once more, because the main thread can block its own connection."""
    return PrefixStore(f"heartbeats {launch}", _get_default_store()).clone()  # type: ignore[attr-defined]  # not in the stub


def _state(process: int) -> str:
    """Return the kernel's state of a process on this host, such as "S (sleeping)", or "gone"."""
    try:
        return process_status("State", process)
    except OSError:
        return "gone"
