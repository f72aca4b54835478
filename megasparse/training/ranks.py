"""The processes of a run: which one this is, on which device, how they agree, and what stops and watches them.

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

from megasparse.config.schema import RunConfig
from megasparse.errors import HANG, NO_LAUNCHER, ConfigError, leave, rank_variable
from megasparse.files import Progress, silent
from megasparse.training.stopping.watchdog import START

POLL = 0.05
MEETING_REPORT = 30.0
"""Seconds that the ranks may need to meet before each says that it waits."""


@dataclass(frozen=True)
class Ranks:
    """This process among the others. One process without a process group is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sequence: torch.distributed.ProcessGroup | None = None
    """The neighbouring ranks that share every sequence with this one; None where it has whole ones."""

    @property
    def sequence_size(self) -> int:
        """Ranks that share a sequence."""
        return 1 if self.sequence is None else self.sequence.size()

    @property
    def place(self) -> int:
        """Which part of the sequences this rank has, from 0 on."""
        return self.rank % self.sequence_size

    @property
    def data_rank(self) -> int:
        """Number of this rank among those that read different sequences, below `data_ranks`."""
        return self.rank // self.sequence_size

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of ranks, that read different sequences."""
        return self.world_size // self.sequence_size

    def gather(self, value: Any, first_only: bool = False) -> list[Any]:
        """Return the JSON values of all ranks, in the order of the ranks. Waits for all of them.

        first_only: ranks other than 0 receive nothing, and return an empty list.
        """
        if self.world_size == 1:
            return [value]
        message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world_size)]
        torch.distributed.all_gather(sizes, torch.tensor([message.numel()], device=self.device))
        lengths = torch.cat(sizes).tolist()  # waits for the device once
        padded = torch.nn.functional.pad(message, (0, max(lengths) - message.numel()))
        texts = [torch.empty_like(padded) for _ in lengths] if self.rank == 0 or not first_only else []
        if first_only:
            torch.distributed.gather(padded, texts or None)
        else:
            torch.distributed.all_gather(texts, padded)
        return [json.loads(text[:length].cpu().numpy().tobytes()) for text, length in zip(texts, lengths, strict=False)]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum of `values` over the ranks, on every rank, in place."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def any(self, answer: bool) -> bool:
        """True if it is true on some rank. Waits for all of them."""
        return self.any_of(answer)[0]

    def any_of(self, *answers: bool) -> list[bool]:
        """For each answer, True if it is true on some rank. Waits for all of them, once."""
        counts = self.sum(torch.tensor(answers, dtype=torch.float32, device=self.device))
        return [count > 0 for count in counts.tolist()]

    def stop(self) -> None:
        """Leave the process group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class RunHooks:
    """Callbacks of a run. With the defaults nobody stops or watches it."""

    stop_wanted: Callable[[], bool] = lambda: False
    """True if this rank knows that the run should save and end. Ranks may learn of it at different steps."""
    progress: Progress = silent
    """Called with what is done next, equally often on all ranks: a rank that hangs has called it less often."""
    alive: Progress = silent
    """Called with what is being done in work of which ranks may have different parts, such as files."""
    trace_wanted: Callable[[], bool] = lambda: False
    """True if this rank was asked, since the last call, for a trace of its next steps."""


class StopWanted(Exception):
    """Raised on all ranks together, out of long work that may be left unfinished."""


def check_stop(hooks: RunHooks, ranks: Ranks, doing: str) -> None:
    """Between pieces of work that can be left out, such as evaluation. All ranks call it equally often.

    Raises StopWanted on every rank if any of them should stop.
    """
    hooks.progress(doing)
    if ranks.any(hooks.stop_wanted()):
        raise StopWanted


def start_ranks(run: RunConfig, sequence: int = 1) -> Ranks:
    """Join the other processes that the launcher started; without a launcher, be the only one.

    sequence: how many neighbouring ranks share a sequence.

    Raises ConfigError where the device does not exist, where `run.engine=torch` meets several processes, where
    `sequence` does not divide their number, and where the address at which they meet is taken or out of reach.
    """
    world_size = _world_size()
    if world_size % sequence:
        problem = f"{sequence} ranks are to share a sequence, but the {world_size} ranks are no multiple of that"
        raise ConfigError("parallel.sequence", problem, "Start a multiple of it, or set it to a divisor")
    if run.engine == "torch" and world_size > 1:
        problem = f'"torch" runs in one process, and {world_size} were started'
        raise ConfigError("run.engine", problem, 'Set run.engine="deepspeed"')
    device = _choose_device(run)
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        local = local_ranks(world_size)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // max(1, local)))
    else:
        torch.cuda.set_device(device)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
        torch.use_deterministic_algorithms(True)
    if run.engine == "torch":
        return Ranks(0, 1, device)
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(alone)
    if not torch.distributed.is_initialized():
        _meet(run, device)
    rank = torch.distributed.get_rank()
    return Ranks(rank, world_size, device, _sequence_groups(run, sequence, world_size)[rank // sequence])


def local_ranks(world_size: int) -> int:
    """Return the number of ranks on this machine, which share its processors and memory."""
    return rank_variable("LOCAL_WORLD_SIZE", rank_variable("LOCAL_SIZE", world_size))


def _world_size() -> int:
    """Return the number of ranks. Raises ConfigError for what a launcher left in the environment, or is no number."""
    size = rank_variable("WORLD_SIZE", 1)
    for name in ("RANK", "LOCAL_RANK"):
        if (rank := rank_variable(name, 0)) >= size:
            raise ConfigError(name, f"{rank}, in the environment, is no rank of WORLD_SIZE={size}", NO_LAUNCHER)
    started = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    if (size > 1 or "RANK" in started) and len(started) < 4:
        raise ConfigError(started[0], f"the environment has only {', '.join(started)} of a launcher's", NO_LAUNCHER)
    return size


def _sequence_groups(run: RunConfig, size: int, world_size: int) -> list[torch.distributed.ProcessGroup | None]:
    """Make the groups of ranks [g·size, (g + 1)·size); None for single ranks. All ranks make all of them, in order."""
    if size == 1:
        return [None] * world_size
    starts, limit = range(0, world_size, size), _time_limit(run)
    return [torch.distributed.new_group(list(range(start, start + size)), timeout=limit) for start in starts]


def _time_limit(run: RunConfig) -> timedelta:
    """Time limit of a collective operation, far behind the watchdog's."""
    return timedelta(seconds=max(3600.0, 20 * run.hang_timeout))


def _meet(run: RunConfig, device: torch.device) -> None:
    """Start the process group. The watchdog finds hangs, and knows a slow save from a dead rank; the group's own time
    limit is the second line, far behind it, where NCCL writes down what it was doing.
    """
    recorder = os.path.join(run.directory, "flight-recorder-rank-")
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", "2000"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", recorder),
    ):
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
        problem = f"the ranks cannot meet at {address} ({str(error).splitlines()[0]})"
        hint = "Choose a port that is free on the first host, and that the other hosts reach"
        raise ConfigError("MASTER_ADDR:MASTER_PORT", problem, hint) from None


def _loopback(limit: timedelta) -> dict[str, Any]:
    """Return the arguments of init_process_group by which ranks of one machine meet on its loopback interface, which
    no other machine reaches; none for several nodes."""
    rank, size, port = rank_variable("RANK", 0), rank_variable("WORLD_SIZE", 1), rank_variable("MASTER_PORT", 0)
    if os.environ["MASTER_ADDR"] not in ("127.0.0.1", "localhost") and rank_variable("LOCAL_WORLD_SIZE", 0) != size:
        return {}
    listening = None
    if rank == 0:  # torch's own socket would listen on every interface
        with socket.create_server(("127.0.0.1", port)) as server:
            port = server.getsockname()[1]
            listening = server.detach()
    store = torch.distributed.TCPStore("127.0.0.1", port, size, rank == 0, limit, master_listen_fd=listening)
    return {"store": store, "rank": rank, "world_size": size}


def _name_of_this_start(store: torch.distributed.Store, rank: int, size: int) -> str:
    """Agree on a name that no earlier start of the ranks has had, in a store where theirs may still be.

    torchrun keeps one store through all its restarts (torch 2.13), and in it the addresses of the ranks that have died,
    which those of the next start would call. Rank 0 proposes a name until each rank has answered to that name with one
    of its own, which only this start's can be, and it sees its own confirmed.
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
    """Guard the meeting of the ranks, before the watchdog starts: report after half a minute that this one waits, and
    end it with errors.HANG after `limit` seconds (0: never).
    """
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
            print(f"HANG: {name} waited {limit:g} s {whom}, and ends with exit code {HANG}", file=sys.stderr)
            leave(HANG)

    threading.Thread(target=wait, name="meeting", daemon=True).start()
    try:
        yield
    finally:
        met.set()


def _choose_device(run: RunConfig) -> torch.device:
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device", '"cuda" was asked for, and PyTorch sees no GPU', 'Set run.device="cpu"')
    if run.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local, devices = rank_variable("LOCAL_RANK", 0), torch.cuda.device_count()
    if local >= devices:
        problem = f"rank {local} of {socket.gethostname()} has no GPU of its own; PyTorch sees {devices} there"
        hint = "Start no more ranks per node than it has GPUs: --nproc-per-node, or slots="
        raise ConfigError("LOCAL_RANK", problem, hint)
    return torch.device("cuda", local)
