"""Run a function on several gloo ranks of this machine, with a time limit."""

import importlib.util
import inspect
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasparse.errors import leave

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(function: Callable[..., Any], world_size: int = 2, timeout: float = 120.0, **arguments: Any) -> list[Any]:
    """Call `function(**arguments)` in `world_size` new processes, each with the environment of its rank.

    Arguments and results are JSON values; returns the results in the order of the ranks. When a rank fails, or
    `timeout` seconds have passed, all are killed and an AssertionError shows what each of them printed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(world_size):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_SIZE": world_size}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": ROOT}
            target = [inspect.getfile(function), function.__name__, json.dumps(arguments), f"{folder}/{rank}.json"]
            with open(f"{folder}/{rank}.txt", "w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, *target],
                        env=os.environ | {key: str(value) for key, value in environment.items()},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        deadline = time.monotonic() + timeout
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            if any(p.poll() for p in processes):
                time.sleep(1.0)  # the others may be about to fail for their own reasons: let them say so
                break
            time.sleep(0.05)
        for process in processes:
            process.kill()
            process.wait()
        output = [Path(f"{folder}/{rank}.txt").read_text() for rank in range(world_size)]
        said = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(output))
        codes = [process.returncode for process in processes]
        assert codes == [0] * world_size, f"exit codes {codes} (limit {timeout} s)\n{said}"
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(world_size)]


def _main(file: str, name: str, arguments: str, result: str) -> None:
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    value = getattr(module, name)(**json.loads(arguments))
    Path(result).write_text(json.dumps(value))


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)
