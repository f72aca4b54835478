"""The processes of a run: which one this is, on which device, and how they agree with each other.

What ranks tell each other travels as JSON, never as pickle.
"""

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from megasparse.config.schema import RunConfig
from megasparse.errors import HANG, ConfigError, leave
from megasparse.training.watchdog import START

MEETING_TOLD = 30.0
"""Seconds that the ranks may need to meet before each says that it waits."""


@dataclass(frozen=True)
class Ranks:
    """This process among the others. One process without a process group is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def gather(self, value: Any) -> list[Any]:
        """The JSON value of every rank, in the order of the ranks, on every rank. Waits for all of them."""
        if self.world_size == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world_size)]
        torch.distributed.all_gather(sizes, torch.tensor([own.numel()], device=self.device))
        longest = max(int(size) for size in sizes)
        padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
        texts = [torch.empty_like(padded) for _ in range(self.world_size)]
        torch.distributed.all_gather(texts, padded)
        return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum of `values` over the ranks, on every rank, in place."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def any(self, here: bool) -> bool:
        """Whether it is true on some rank. Waits for all of them."""
        return bool(self.sum(torch.tensor(float(here), device=self.device)))

    def stop(self) -> None:
        """Take leave of the other ranks."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def start_ranks(run: RunConfig) -> Ranks:
    """Join the other processes that the launcher started; without a launcher, be the only one.

    Raises ConfigError where the device does not exist, where `run.engine=torch` meets several processes, and where
    the address at which they meet is taken or out of reach.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if run.engine == "torch" and world_size > 1:
        raise ConfigError(
            "run.engine", f'"torch" runs in one process, and {world_size} were started', 'Set run.engine="deepspeed"'
        )
    device = _choose_device(run)
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world_size)))
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
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone, MASTER_PORT=str(_free_port()))
    if not torch.distributed.is_initialized():
        _meet(run, device)
    return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)


def _meet(run: RunConfig, device: torch.device) -> None:
    """Start the process group. What hangs is found by the watchdog, which knows a slow save from a dead rank; the
    group's own time limit is the second line, far behind it, and then NCCL writes down what it was doing.
    """
    recorder = os.path.join(run.directory, "flight-recorder-rank-")
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", "2000"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", recorder),
    ):
        os.environ.setdefault(name, value)
    limit = timedelta(seconds=max(3600.0, 20 * run.hang_timeout))
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        with _patience(place, START * run.hang_timeout):
            torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=limit)
    except torch.distributed.DistNetworkError as error:
        problem = f"the ranks cannot meet at {place} ({str(error).splitlines()[0]})"
        mend = "Choose a port that is free on the first host, and that the other hosts reach"
        raise ConfigError("MASTER_ADDR:MASTER_PORT", problem, mend) from None


@contextmanager
def _patience(place: str, limit: float) -> Iterator[None]:
    """While the ranks meet, where no watchdog looks yet: say after half a minute that this one waits, and end it with
    errors.HANG after `limit` seconds (0: never).
    """
    met, told = threading.Event(), min(MEETING_TOLD, limit or MEETING_TOLD)
    name = f"rank {os.environ['RANK']} on {socket.gethostname()}"
    whom = f"for the {os.environ['WORLD_SIZE']} ranks to meet at {place}"
    mend = (
        "Have all nodes started their ranks, is that the first node's address, and is the port open? "
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the network interface (docs/nodes.md)"
    )

    def wait() -> None:
        if met.wait(told):
            return
        print(f"{name} has waited {told:g} s {whom}. {mend}", file=sys.stderr, flush=True)
        if limit and not met.wait(limit - told):
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
    local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= devices:
        problem = f"rank {local} of {socket.gethostname()} has no GPU of its own; PyTorch sees {devices} there"
        raise ConfigError("LOCAL_RANK", problem, "Start no more ranks a node than it has GPUs: --ranks, or slots=")
    return torch.device("cuda", local)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
