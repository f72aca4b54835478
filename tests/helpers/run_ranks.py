"""Run a function on several gloo ranks of this machine, with a time limit."""

import gc
import json
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megasparse.errors import leave

ROOT = Path(__file__).resolve().parents[2]
READY = ("pytest", "torch._dynamo", "deepspeed", "tests.helpers.tiny", "megasparse.runs.pretraining")
"""Modules preloaded by the fork server: importing takes as long as most tests compute."""


def run_ranks(function: Callable[..., Any], world_size: int = 2, timeout: float = 120.0, **arguments: Any) -> list[Any]:
    """Call `function(**arguments)` in `world_size` new processes, each with the environment of its rank.

    Arguments and results are JSON values; returns the results in the order of the ranks. When a rank fails, or
    `timeout` seconds have passed, all are killed and an AssertionError shows what each of them printed. Processes are
    forked from a server that has imported what they need and computed nothing; none may use a GPU."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([*READY])
    with patch.dict(os.environ, DS_ACCELERATOR="cpu"):  # as DeepSpeed looks for a GPU when it is imported
        forkserver.ensure_running()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(world_size):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_SIZE": world_size}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            known = {**os.environ, **{key: str(value) for key, value in environment.items()}}
            work = (function, json.dumps(arguments), f"{folder}/{rank}", known)
            processes.append(forks.Process(target=_rank, args=work, daemon=True))
            processes[-1].start()
        deadline = time.monotonic() + timeout
        while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
            if any(p.exitcode for p in processes):
                time.sleep(1.0)  # the others may be about to fail for their own reasons: let them say so
                break
            time.sleep(0.05)
        for process in processes:
            process.kill()
            process.join()
        output = [Path(f"{folder}/{rank}.txt") for rank in range(world_size)]
        texts = (file.read_text() if file.exists() else "" for file in output)
        said = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        codes = [process.exitcode for process in processes]
        assert codes == [0] * world_size, f"exit codes {codes} (limit {timeout} s)\n{said}"
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(world_size)]


def _rank(function: Callable[..., Any], arguments: str, result: str, environment: dict[str, str]) -> None:
    """In the new process: write the result as JSON to one file and the output to another."""
    with open(f"{result}.txt", "w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # DeepSpeed collects garbage at every start, half a second each time among all that was imported
    try:
        Path(f"{result}.json").write_text(json.dumps(function(**json.loads(arguments))))
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)
