"""The process group of a run: rank, device, agreement between ranks, and the callbacks that stop and watch the run.

Messages between ranks are JSON, never pickle.
"""

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from megasparse import errors
from megasparse.config.schema import RunConfig
from megasparse.errors import HANG, NO_LAUNCHER, ConfigError, UserError, leave, rank_variable
from megasparse.files import Progress, silent
from megasparse.system import usable_cores
from megasparse.training.stopping.watchdog import START

POLL = 0.05
MEETING_REPORT = 30.0
"""Seconds at the rendezvous before each rank prints that it is waiting."""


@dataclass(frozen=True)
class Ranks:
    """This process and its process group. Without a process group, rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sequence: torch.distributed.ProcessGroup | None = None
    """Consecutive ranks that split every sequence with this one, if any."""

    @property
    def sequence_size(self) -> int:
        """Number of ranks that split a sequence."""
        return 1 if self.sequence is None else self.sequence.size()

    @property
    def sequence_rank(self) -> int:
        return self.rank % self.sequence_size

    @property
    def data_rank(self) -> int:
        """Data-parallel rank, below `data_ranks`."""
        return self.rank // self.sequence_size

    @property
    def data_ranks(self) -> int:
        """Number of ranks, or of sequence groups, that read different sequences."""
        return self.world_size // self.sequence_size

    def gather(self, value: Any, first_only: bool = False) -> list[Any]:
        """Return the JSON values of all ranks, in rank order; with `first_only` on rank 0 only. All ranks call it."""
        if self.world_size == 1:
            return [value]
        message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world_size)]
        torch.distributed.all_gather(sizes, torch.tensor([message.numel()], device=self.device))
        lengths = torch.cat(sizes).tolist()  # a single device synchronisation
        padded = torch.nn.functional.pad(message, (0, max(lengths) - message.numel()))
        texts = [torch.empty_like(padded) for _ in lengths] if self.rank == 0 or not first_only else []
        if first_only:
            torch.distributed.gather(padded, texts or None)
        else:
            torch.distributed.all_gather(texts, padded)
        return [json.loads(text[:length].cpu().numpy().tobytes()) for text, length in zip(texts, lengths, strict=False)]

    def on_first_rank(self, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0 while the others wait. Return its JSON value, or raise its UserError, on all ranks."""
        value = problem = None
        if self.rank == 0:
            try:
                value = work()
            except UserError as error:
                problem = {"kind": type(error).__name__, "args": error.args, "values": vars(error)}
        value, problem = self.gather((value, problem))[0]
        if problem is not None:
            kind = getattr(errors, problem["kind"], UserError)
            copy = kind.__new__(kind, *problem["args"])
            vars(copy).update(problem["values"])
            raise copy
        return value

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce `values` in place with a sum, and return them."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def exchange(self, vectors: list[torch.Tensor], lengths: list[int]) -> list[torch.Tensor]:
        """Send one vector to each rank. Return the vectors of these lengths that they sent, on this device."""
        if self.world_size == 1:
            return [vector.to(self.device) for vector in vectors]
        sent = torch.cat(vectors).to(self.device)
        received = sent.new_empty(sum(lengths))
        torch.distributed.all_to_all_single(received, sent, lengths, [vector.numel() for vector in vectors])
        return list(received.split(lengths))

    def any(self, answer: bool) -> bool:
        """True if `answer` is true on any rank. All ranks call it."""
        return self.any_of(answer)[0]

    def any_of(self, *answers: bool) -> list[bool]:
        """For each answer, True if it is true on any rank, with a single all-reduce."""
        counts = self.sum(torch.tensor(answers, dtype=torch.float32, device=self.device))
        return [count > 0 for count in counts.tolist()]

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, file=sys.stderr)

    def stop(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class RunHooks:
    """Callbacks of a run. The defaults do nothing."""

    stop_wanted: Callable[[], bool] = lambda: False
    """True if this rank requests a save and stop. Ranks may learn of a request at different steps."""
    progress: Progress = silent
    """Called with the name of the next operation, equally often on all ranks; a hanging rank falls behind."""
    alive: Progress = silent
    """Called with the current operation if the number of calls may differ between ranks."""
    trace_wanted: Callable[[], bool] = lambda: False
    """True if a trace of the next steps was requested since the last call."""


class StopWanted(Exception):
    """Raised on all ranks together to interrupt long work that may remain unfinished."""


def check_stop(hooks: RunHooks, ranks: Ranks, doing: str) -> None:
    """Raise StopWanted on every rank if any of them should stop. All ranks call it equally often, between parts of work
    that may remain unfinished.
    """
    hooks.progress(doing)
    if ranks.any(hooks.stop_wanted()):
        raise StopWanted


def start_ranks(run: RunConfig, sequence: int = 1) -> Ranks:
    """Join the process group of the launcher; without a launcher, make one of this process only. sequence: number of
    consecutive ranks that split a sequence. Raises ConfigError for settings that do not fit the machine or the
    launcher.
    """
    world_size = _world_size()
    if world_size % sequence:
        problem = f"{sequence} ranks per sequence do not divide the world size {world_size}"
        raise ConfigError("parallel.sequence", problem, "Start a multiple of it, or set it to a divisor")
    if run.engine == "torch" and world_size > 1:
        raise ConfigError("run.engine", f'"torch" supports one process, not {world_size}', 'Set run.engine="deepspeed"')
    device = _choose_device(run)
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        local = local_ranks(world_size)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, usable_cores() // max(1, local)))
    else:
        torch.cuda.set_device(device)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by deterministic cuBLAS
        torch.use_deterministic_algorithms(True)
    if run.engine == "torch":
        return Ranks(0, 1, device)
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(alone)
    if not torch.distributed.is_initialized():
        _meet(run, device)
    rank, group = torch.distributed.get_rank(), None
    for start in range(0, world_size, sequence) if sequence > 1 else ():  # all ranks make all groups, in order
        made = torch.distributed.new_group(list(range(start, start + sequence)), timeout=_time_limit(run))
        group = made if start <= rank < start + sequence else group
    return Ranks(rank, world_size, device, group)


def local_ranks(world_size: int) -> int:
    return rank_variable("LOCAL_WORLD_SIZE", rank_variable("LOCAL_SIZE", world_size))


def _world_size() -> int:
    size = rank_variable("WORLD_SIZE", 1)
    for name in ("RANK", "LOCAL_RANK"):
        if (rank := rank_variable(name, 0)) >= size:
            raise ConfigError(name, f"{rank} is not below WORLD_SIZE={size}", NO_LAUNCHER)
    started = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    if (size > 1 or "RANK" in started) and len(started) < 4:
        raise ConfigError(started[0], f"of the launcher's variables only {', '.join(started)} is set", NO_LAUNCHER)
    return size


def _time_limit(run: RunConfig) -> timedelta:
    """Return the timeout of collective operations, much longer than the watchdog's."""
    return timedelta(seconds=max(3600.0, 20 * run.hang_timeout))


def _meet(run: RunConfig, device: torch.device) -> None:
    """Initialise the process group. The watchdog detects hangs, and can tell a slow save from a dead rank; the group's
    own timeout is a much longer fallback, after which NCCL dumps its flight recorder.
    """
    recorder = os.path.join(run.directory, "flight-recorder-rank-")
    recording = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    for name, value in (recording | {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": recorder}).items():
        os.environ.setdefault(name, value)
    backend = "nccl" if device.type == "cuda" else "gloo"
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        with _patience(address, START * run.hang_timeout):
            if torch.distributed.is_torchelastic_launched():
                store, rank, size = next(torch.distributed.rendezvous("env://", timeout=_time_limit(run)))
                store = torch.distributed.PrefixStore(_name_of_this_start(store, rank, size), store)
                joining: dict[str, Any] = {"store": store, "rank": rank, "world_size": size}
            else:
                joining = _loopback(_time_limit(run))
            torch.distributed.init_process_group(backend, timeout=_time_limit(run), **joining)
    except (torch.distributed.DistNetworkError, OSError, OverflowError) as error:
        problem = f"the rendezvous at {address} failed ({str(error).splitlines()[0]})"
        hint = "Choose a port that is free on the first host and reachable from the other hosts"
        raise ConfigError("MASTER_ADDR:MASTER_PORT", problem, hint) from None


def _loopback(limit: timedelta) -> dict[str, Any]:
    """Return the arguments of a rendezvous on the loopback interface; empty for several nodes."""
    rank, size, port = rank_variable("RANK", 0), rank_variable("WORLD_SIZE", 1), rank_variable("MASTER_PORT", 0)
    if os.environ["MASTER_ADDR"] not in ("127.0.0.1", "localhost") and rank_variable("LOCAL_WORLD_SIZE", 0) != size:
        return {}
    listening = None
    if rank == 0:  # torch's own socket would listen on every interface
        with socket.create_server(("127.0.0.1", port)) as server:
            port = server.getsockname()[1]
            listening = server.detach()
    options: dict[str, Any] = {"master_listen_fd": listening}
    try:
        store = torch.distributed.TCPStore("127.0.0.1", port, size, rank == 0, limit, **options)
    except NotImplementedError:  # libuv accepts no open socket in torch 2.7
        store = torch.distributed.TCPStore("127.0.0.1", port, size, rank == 0, limit, **options, use_libuv=False)
    return {"store": store, "rank": rank, "world_size": size}


def _name_of_this_start(store: torch.distributed.Store, rank: int, size: int) -> str:
    """Agree on a name for this start of the ranks that no earlier start has used: torchrun keeps one store across
    restarts (torch 2.13), with the addresses of ranks that have died.

    Rank 0 proposes a name until every rank has answered it with a name of this start, and each rank waits until its own
    name is confirmed.
    """
    name = uuid.uuid4().hex
    if rank == 0:
        store.set("start", name)
        for other in range(1, size):
            store.set(f"confirmed {store.get(f'answer {name} {other}').decode()}", name)
        return name
    while not store.check([f"confirmed {name}"]):
        store.set(f"answer {store.get('start').decode()} {rank}", name)
        time.sleep(POLL)
    return str(store.get(f"confirmed {name}").decode())


@contextmanager
def _patience(address: str, limit: float) -> Iterator[None]:
    """Watch the rendezvous, before the watchdog starts: print a notice, and exit with errors.HANG after `limit` s."""
    met, reported = threading.Event(), min(MEETING_REPORT, limit or MEETING_REPORT)
    name = f"rank {os.environ['RANK']} on {socket.gethostname()}"
    whom = f"for the {os.environ['WORLD_SIZE']} ranks to meet at {address}"
    hint = (
        "Have all nodes started their ranks, is that the first node's address, and is the port open? "
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the network interface (docs/nodes.md)"
    )

    def wait() -> None:
        if met.wait(reported):
            return
        print(f"{name} has waited {reported:g} s {whom}. {hint}", file=sys.stderr, flush=True)
        if limit and not met.wait(limit - reported):
            print(f"HANG: {name} waited {limit:g} s {whom}. It exits with code {HANG}", file=sys.stderr)
            leave(HANG)

    threading.Thread(target=wait, name="meeting", daemon=True).start()
    try:
        yield
    finally:
        met.set()


def _choose_device(run: RunConfig) -> torch.device:
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device", '"cuda" was requested, but PyTorch finds no GPU', 'Set run.device="cpu"')
    if run.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local, devices = rank_variable("LOCAL_RANK", 0), torch.cuda.device_count()
    if local >= devices:
        problem = f"rank {local} of {socket.gethostname()} needs a GPU, but PyTorch finds only {devices}"
        hint = "Start no more ranks per node than it has GPUs: --nproc-per-node, or slots="
        raise ConfigError("LOCAL_RANK", problem, hint)
    return torch.device("cuda", local)
