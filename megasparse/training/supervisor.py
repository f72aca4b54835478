"""Start the ranks of this node, pass signals on, end all when one ends badly, and start again where that may help.

A rank leads a session of its own: a terminal's Ctrl-C reaches the supervisor alone, which passes it on once, and a rank
is ended together with what it has started. A save that a signal asked for may take as long as it takes.
"""

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from megasparse.config.load import load_config
from megasparse.config.schema import Config
from megasparse.errors import (
    HANG,
    LOST_PEER,
    ConfigError,
    MemoryShortage,
    StorageError,
    TrainingError,
    UserError,
)
from megasparse.training.checkpoints.manifest import find_newest

VISIBLE = "CUDA_VISIBLE_DEVICES"
TRY_AGAIN = 3600.0
"""Seconds after which a run that goes on with fewer ranks stops for a try with all; doubled after each that fails."""


@dataclass(frozen=True)
class NodeLayout:
    """The ranks of this node among all, and where they meet. address: (host, port) of rank 0; None on a single node."""

    ranks: int = 1
    """Ranks of every node before the last one that has any."""
    nodes: int = 1
    node_rank: int = 0
    address: tuple[str, int] | None = None
    total: int | None = None
    """Ranks of all nodes; None is nodes × ranks."""
    devices: tuple[str, ...] = ()
    """The devices that the ranks of this node see, each its own; empty: what the environment says."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks if self.total is None else self.total

    @property
    def here(self) -> int:
        """Ranks of this node."""
        return max(0, min(self.ranks, self.world_size - self.node_rank * self.ranks))

    def environment(self, local_rank: int, address: tuple[str, int]) -> dict[str, str]:
        """The environment of a rank, of those that meet at an address."""
        values: dict[str, object] = {
            "RANK": self.node_rank * self.ranks + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.here,
            "LOCAL_SIZE": self.here,  # DeepSpeed's name for it
            "MASTER_ADDR": address[0],
            "MASTER_PORT": address[1],
        }
        if self.devices:
            values[VISIBLE] = ",".join(self.devices)
        return {**os.environ, **{key: str(value) for key, value in values.items()}}


def possible_ranks(config: Config) -> list[int]:
    """Numbers of ranks among which the global batch can be shared out, ascending."""
    batches, sharing = config.training.global_batch // config.training.micro_batch, config.parallel.sequence
    return [number * sharing for number in range(1, batches + 1) if batches % number == 0]


def ranks_to_go_on_with(config: Config, most: int, least: int | None) -> list[int]:
    """The numbers of ranks that a run started on `most` may have, the largest first: that one alone where `least` is
    None. Raises ConfigError, which names those among which the global batch divides, where there is none.
    """
    possible = possible_ranks(config)
    listed = f"{config.training.global_batch} sequences divide among {', '.join(map(str, possible))}"
    if least is None and most not in possible:
        problem = f"{most} ranks cannot share out training.global_batch: {listed}"
        raise ConfigError("--ranks", problem, "Start one of these numbers, or give --min-ranks for the next below")
    sizes = [number for number in reversed(possible) if (least or most) <= number <= most]
    if not sizes:
        problem = f"no number of ranks from {least} to {most} can share out training.global_batch: {listed}"
        raise ConfigError("--min-ranks", problem, "Give one of these, or change training.global_batch")
    return sizes


@dataclass
class RanksLeft:
    """The layout of a node whose devices may be lost for a while. Only on a single node: elsewhere it never changes."""

    whole: NodeLayout
    sizes: list[int]
    """Numbers of ranks of the whole run that are possible, the largest first."""
    clock: Callable[[], float]
    _lost: set[str] = field(default_factory=set)
    _pause: float = 0.0
    _try_at: float = 0.0

    def __post_init__(self) -> None:
        named = os.environ.get(VISIBLE, "")
        self._devices = named.split(",") if named else list(map(str, range(self.whole.ranks)))

    def layout(self) -> NodeLayout:
        """The layout of the next start."""
        left = tuple(device for device in self._devices if device not in self._lost)
        if not self._lost:
            return replace(self.whole, total=self.sizes[0])
        return replace(self.whole, total=self._largest(len(left)), devices=left)

    def lose(self, local_rank: int) -> bool:
        """Go on without the device of a rank of the last layout. False where too few would be left."""
        device = (self.layout().devices or self._devices)[local_rank]
        if self.whole.nodes > 1 or self._largest(len(self._devices) - len(self._lost) - 1) is None:
            return False
        self._lost.add(device)
        self._pause = 2 * self._pause or TRY_AGAIN
        self._try_at = self.clock() + self._pause
        return True

    def due(self) -> bool:
        """True if it is time for a try with all devices."""
        return bool(self._lost) and self.clock() >= self._try_at

    def restore(self) -> None:
        """Take all devices in the next layout."""
        self._lost.clear()

    def proven(self) -> None:
        """Note a new checkpoint: where all devices made it, the next loss is the first one."""
        if not self._lost:
            self._pause = 0.0

    def _largest(self, devices: int) -> int | None:
        return next((size for size in self.sizes if size <= devices), None)


def oom_kills() -> int | None:
    """Processes that the kernel has killed for want of memory since it started; None where it does not say."""
    try:
        words = Path("/proc/vmstat").read_text().split()
        return int(words[words.index("oom_kill") + 1])
    except (OSError, ValueError, IndexError):
        return None


def killed_for_memory(before: int | None, after: int | None) -> str:
    """Explain a SIGKILL by the kernel's count of out-of-memory kills before and after it."""
    if before is None or after is None:
        return "; was the machine out of memory?"
    if after == before:
        return "; not by the kernel for want of memory, which it counts"
    return (
        "; the machine was out of memory, and the kernel killed for it. The last line of metrics.jsonl has what rank 0 "
        "held (memory/...), megasparse plan what a rank takes and what would take less"
    )


class Spares:
    """The ranks in reserve for a command, which begins with the name of Python."""

    def __init__(self, command: list[str]):
        self._command = [sys.executable, "-m", "megasparse.runs.spare", *command[1:]]
        self._waiting: list[subprocess.Popen[bytes]] = []
        self._wanted = 0

    def full(self) -> bool:
        """True if as many were started as `fill` was asked for, since the last was taken."""
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


POLL = 0.05
LAST_WORDS = 3.0
"""Seconds that the other ranks have to end by themselves once one has ended badly. Then they are killed."""
NORMAL_END = 60.0
"""Seconds that the other ranks have once one has ended well, unless a signal has asked all of them to save and stop."""
AGAIN = 0.5
"""Seconds after a SIGTERM or SIGINT from which another one means: at once."""
AT_ONCE = 5.0
"""Seconds that the ranks then have."""
LOOK = 1.0
"""Seconds between looks for a checkpoint, after the first of which ranks are kept in reserve."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0
"""Seconds before a restart; doubled with every restart that leads nowhere."""

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
USELESS_TO_RESTART = (UserError.exit_code, TrainingError.exit_code)
EXIT_CODES = {
    1: "an error of the program",
    UserError.exit_code: "a mistake to correct",
    StorageError.exit_code: "a checkpoint could not be written",
    TrainingError.exit_code: "training diverged, and would again",
    HANG: "the run hung",
    LOST_PEER: "it lost another rank",
    MemoryShortage.exit_code: "memory did not suffice",
}
SIGNAL_NAMES = {int(number): number.name for number in signal.Signals}


def supervised_config(script_arguments: Sequence[str], restarts: int = 0) -> Config:
    """Configuration of the run that a training script's arguments (--config, --set) configure.

    Raises ConfigError where that configuration is wrong (all of it but the `deepspeed` section, which is DeepSpeed's to
    check, and importing that takes seconds), or where every one of several starts would begin at the same checkpoint.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--config")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--resume", default="auto")
    args, _ = parser.parse_known_args(script_arguments)
    if args.config is None:
        raise ConfigError("--config", "is not given", "Add the run's JSON file to the arguments of the script")
    if restarts and args.resume != "auto":
        problem = f"every one of {restarts} restarts would begin there again"
        raise ConfigError(f"--resume {args.resume}", problem, "Leave out --restarts, or --resume")
    return load_config(args.config, [*args.set, "deepspeed={}"])


def reserve_port(host: str, port: int) -> socket.socket:
    """Bind a socket to the port (0: a free one); while it lives, no other process is given that port by chance.

    With SO_REUSEADDR on both sides, and as this one never listens, rank 0 can listen there nevertheless.
    Raises OSError where somebody else listens.
    """
    reserved = socket.socket()
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, port))
    except OSError:
        reserved.close()
        raise
    return reserved


@contextmanager
def meeting_point(layout: NodeLayout) -> Iterator[tuple[str, int]]:
    """Yield host and port of rank 0, reserved where that rank runs here. Raises UserError where it is taken."""
    if layout.address and layout.node_rank > 0:
        yield layout.address
        return
    host, port = layout.address or ("127.0.0.1", 0)
    try:
        reserved = reserve_port("" if layout.address else host, port)
    except OSError as error:
        hint = "End what listens there (ss -ltnp shows it), or choose another port"
        raise UserError(f"--address {host}:{port}: the port cannot be had ({error.strerror}). {hint}") from None
    with reserved:
        yield host, reserved.getsockname()[1]


class RunOver(Exception):
    """There is no next start, and why. code: the exit code of the host that ended the run."""

    def __init__(self, why: str, code: int = 0):
        super().__init__(why)
        self.code = code


class RankProcess:
    """One rank. It is not reaped before `reap`, so that its number cannot have come to mean another process."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        clock: Callable[[], float],
        spare: "subprocess.Popen[bytes] | None" = None,
    ):
        self._clock = clock
        self.rank, self.local_rank = environment["RANK"], int(environment["LOCAL_RANK"])
        self._oom_kills = oom_kills()
        self.process = spare or subprocess.Popen(command, env=environment, start_new_session=True)
        if spare is not None:
            send(spare, environment)
        self.code: int | None = None
        """Its exit code, or minus the number of the signal that killed it; None while it runs, or if we killed it."""
        self.ended_at = math.inf

    def ended(self) -> bool:
        if self.code is None:
            state = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if state is not None:
                self.code = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
                self.ended_at = self._clock()
        return self.code is not None

    def send(self, signum: int) -> None:
        if not self.ended():
            os.kill(self.process.pid, signum)

    def kill(self) -> None:
        """Kill it and all it has started, stopped ones too."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self) -> None:
        self.process.wait()

    def __str__(self) -> str:
        name = f"rank {self.rank} (pid {self.process.pid})"
        if self.code is None:
            return f"{name} was still running {NORMAL_END:g} s after another had ended well, and was killed"
        if self.code < 0:
            why = killed_for_memory(self._oom_kills, oom_kills()) if self.code == -signal.SIGKILL else ""
            return f"{name} was killed by {SIGNAL_NAMES.get(-self.code, -self.code)}{why}"
        words = f" ({EXIT_CODES[self.code]})" if self.code in EXIT_CODES else ""
        return f"{name} ended with exit code {self.code}{words}"


class Supervisor:
    """Runs `command` as the ranks of this node's `layout` until they end well or a signal has ended them.

    checkpoints: folder of the run's checkpoints, which shows its progress; None of a command that has none. restarts:
    how often in a row a failure may be followed by another start without a new checkpoint in between. sizes: numbers of
    ranks of all nodes that the run may have, the largest first; it goes on with fewer, without the device of the rank
    at fault, where restarts are used up, and tries all again after TRY_AGAIN seconds. clock: seconds since any moment.
    """

    def __init__(
        self,
        command: list[str],
        layout: NodeLayout,
        checkpoints: Path | None,
        restarts: int = 0,
        sizes: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self.command, self.checkpoints, self.restarts = command, checkpoints, restarts
        self.left = RanksLeft(layout, list(sizes) or [layout.world_size], clock)
        self.layout = self.left.layout()
        self._at_fault: RankProcess | None = None
        self._growing = False
        self._begun_at = -1
        self._spares, self._look_at = Spares(command), 0.0
        self._clock = clock
        self.arrived: list[int] = []
        """Signals that are still to be passed on."""
        self.forwarded: set[int] = set()
        """Signals that were passed on."""
        self.asked_at: float | None = None
        """Time of the first SIGTERM or SIGINT."""
        self.insisted: tuple[int, float] | None = None
        """The second SIGTERM or SIGINT, and its time."""

    def run(self) -> int:
        """Return the exit code: 0 where all ended well, else that of the rank at fault (128 + n: signal n)."""
        try:
            return self._run()
        finally:
            self._spares.end()

    def _run(self) -> int:
        for signum in FORWARDED:
            signal.signal(signum, lambda number, _: self.arrived.append(number))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would take the exit codes away
        failures = code = 0
        while True:
            try:
                failures = 0 if self._agree(used_up=failures > self.restarts) else failures
            except RunOver as over:
                report(f"stopped: {over}")
                return code or over.code
            before = self._begun_at = self._newest_step()
            code, cause = self._run_once()
            after = self._newest_step()
            if after > before:
                self.left.proven()
            if code == 0:
                if self._stopping() or not self._grows():
                    return 0
                failures = self.restarts  # one more is enough to go on with fewer again
                continue
            failures = 1 if after > before else failures + 1
            useless = code in USELESS_TO_RESTART
            used_up = failures > self.restarts and not useless
            if used_up and not self._stopping() and self._go_on_with_fewer(code, cause):
                continue
            if used_up and self.restarts:
                where = f"at the same checkpoint {after:08d}" if after >= 0 else "before the first checkpoint"
                cause = f"stopped: ended {failures} times {where} without getting further; the last cause: {cause}"
            report(cause)
            if used_up or useless or self._stopping():
                return code
            seconds = min(FIRST_WAIT * 2 ** max(0, failures - 1), LONGEST_WAIT)
            report(f"starting again in {seconds:g} s (restart {failures} of {self.restarts} without a new checkpoint)")
            self._wait(seconds)
            if self._stopping():
                return code

    def _agree(self, used_up: bool) -> bool:
        """Settle the layout of the next start; whether it is one whose failures count anew. Raises RunOver where there
        is none. used_up: whether the last start was the last one with its layout.
        """
        self.layout = self.left.layout()
        return used_up

    def _grows(self) -> bool:
        """True if ranks that have ended well did so to start again, as more than they were."""
        if self._growing:
            self.left.restore()
            report(f"trying all {self.left.layout().world_size} ranks again")
        return self._growing

    def _run_once(self) -> tuple[int, str]:
        """Start the ranks and wait for the end of the last; return the exit code, and the cause in words."""
        ranks: list[RankProcess] = []
        self._growing = False
        with meeting_point(self.layout) as address:
            try:
                for local_rank in range(self.layout.here):
                    environment = self.layout.environment(local_rank, address)
                    spare = self._spares.take() if not self.layout.devices else None
                    ranks.append(RankProcess(self.command, environment, self._clock, spare))
                while not all([rank.ended() for rank in ranks]) and self._clock() < self._limit(ranks):
                    time.sleep(POLL)
                    self._forward(ranks)
                    self._ask_for_all(ranks)
                    self._prepare_spares()
                    self._look()
            finally:
                for rank in ranks:
                    rank.kill()
                for rank in ranks:
                    rank.reap()
        return self._verdict(ranks)

    def _forward(self, ranks: list[RankProcess]) -> None:
        while self.arrived:
            signum, now = self.arrived.pop(0), self._clock()
            if signum != signal.SIGUSR1:
                if self.asked_at is None:
                    self.asked_at = now
                elif now < self.asked_at + AGAIN:
                    continue  # the same request: some launchers send SIGINT and SIGTERM together
                else:
                    self.insisted = self.insisted or (signum, now)
            for rank in ranks:
                rank.send(signum)
            self.forwarded.add(signum)

    def _ask_for_all(self, ranks: list[RankProcess]) -> None:
        """Let the ranks save and end where it is time to try all of them again, and fewer have proved to work."""
        if self._due() and not self._growing and not self._stopping() and self._newest_step() > self._begun_at:
            self._growing = True
            self._announce()
            for rank in ranks:
                rank.send(signal.SIGUSR1)

    def _prepare_spares(self) -> None:
        """Start the ranks of a restart, which take seconds to import what they need, once these have saved."""
        due = self.restarts and not self._spares.full() and not self._stopping()
        if due and self._clock() >= self._look_at:
            self._look_at = self._clock() + LOOK
            if self._newest_step() > self._begun_at:
                self._spares.fill(self.layout.here)

    def _look(self) -> None:
        """Hook called on every poll."""

    def _due(self) -> bool:
        """True if it is time to try more ranks."""
        return self.left.due()

    def _announce(self) -> None:
        """Hook called before ranks are asked to end so that more can start."""

    def _go_on_with_fewer(self, code: int, cause: str) -> bool:
        """True if the run can go on without what is at fault, here the device of a rank."""
        if self._at_fault is None or not self.left.lose(self._at_fault.local_rank):
            return False
        left = self.left.layout()
        report(f"{cause}; going on without its device, with {left.world_size} of {self.left.sizes[0]} ranks")
        return True

    def _limit(self, ranks: list[RankProcess]) -> float:
        """Time at which those that still run are killed."""
        limits = [rank.ended_at + LAST_WORDS for rank in ranks if rank.code]
        if not self._stopping() and not self._growing:
            limits += [rank.ended_at + NORMAL_END for rank in ranks if rank.code == 0]
        if self.insisted:
            limits.append(self.insisted[1] + AT_ONCE)
        return min(limits, default=math.inf)

    def _verdict(self, ranks: list[RankProcess]) -> tuple[int, str]:
        self._at_fault = None
        if all(rank.code == 0 for rank in ranks):
            return 0, ""
        if self.insisted:
            return 128 + self.insisted[0], f"ended at once, as a second {SIGNAL_NAMES[self.insisted[0]]} asked for"
        if early := {-rank.code for rank in ranks if rank.code} & self.forwarded:
            if self.checkpoints is None:
                return 128 + min(early), f"stopped by {SIGNAL_NAMES[min(early)]}"
            report(f"stopped by {SIGNAL_NAMES[min(early)]} before training had begun: there was nothing to save")
            return 0, ""
        failed = sorted((rank for rank in ranks if rank.code), key=lambda rank: rank.ended_at)
        if not failed:
            return HANG, str(next(rank for rank in ranks if rank.code is None))
        # A rank that lost another may well be seen first; what the other died of is the cause.
        cause = next((rank for rank in failed if rank.code != LOST_PEER), failed[0])
        self._at_fault = cause
        assert cause.code is not None
        return cause.code if cause.code > 0 else 128 - cause.code, str(cause)

    def _newest_step(self) -> int:
        """Step of the newest checkpoint; -1 where there is none, or the storage cannot be read right now."""
        try:
            newest = None if self.checkpoints is None else find_newest(self.checkpoints)
        except OSError:
            return -1
        return int(newest.name) if newest else -1

    def _stopping(self) -> bool:
        return bool(self.arrived or self.forwarded)

    def _wait(self, seconds: float) -> None:
        end = self._clock() + seconds
        while self._clock() < end and not self._stopping():
            time.sleep(POLL)
            self._look()


def report(line: str) -> None:
    print(f"supervisor: {line}", file=sys.stderr, flush=True)
