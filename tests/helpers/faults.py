"""A tiny training run to do harm to: started by the launcher that users have, watched and signalled from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasparse.training.checkpoints.manifest import list_checkpoints

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--shutdown-timeout", "10"]
"""torchrun, which kills processes ten seconds after asking them to end."""
SCRIPT = Path(__file__).with_name("faulty_pretrain.py")
LIMIT = 120.0
"""Seconds that anything may take; a test that waits longer has found a hang."""

Fault = dict[str, Any]


@dataclass(frozen=True)
class Ended:
    code: int
    seconds: float
    """From the moment given, or from the start."""
    said: str
    """Everything that the launcher and the ranks wrote to stdout and stderr in this start."""


class Run:
    """A run of two small layers with dropout in `folder`, on the shards in `data`. `sections` override keys."""

    def __init__(self, folder: Path, data: Path, **sections: dict[str, Any]):
        self.folder, self.directory = folder, folder / "run"
        folder.mkdir(parents=True, exist_ok=True)
        attention = {"pattern": ["local", "lsh"], "local": {"chunk": 8}, "lsh": {"chunk": 8}}
        size = {"max_length": 64, "layers": 2, "d_model": 32, "d_ff": 64, "heads": 4}
        config: dict[str, dict[str, Any]] = {
            "run": {"directory": str(self.directory), "device": "cpu"},
            "model": {**size, "dropout": 0.1, "attention": attention},
            "data": {"path": str(data), "sequence_length": 64},
            "training": {"steps": 20, "global_batch": 4, "micro_batch": 1},
            "evaluation": {"every": 0, "sequences": 2},
            "checkpoint": {"every": 2, "keep": 2},
            "logging": {"every": 1000},
            "deepspeed": {"zero_optimization": {"stage": 2}},
        }
        for name, section in sections.items():
            config[name] = {**config[name], **section} if section else {}
        if config["run"].get("engine") == "torch":
            config["deepspeed"] = {}
        (folder / "config.json").write_text(json.dumps(config))
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(
        self,
        *arguments: str,
        ranks: int | None = 2,
        faults: Sequence[Fault] = (),
        restarts: int = 0,
        script: Path = SCRIPT,
    ) -> None:
        """Start it with `arguments` for the script by torchrun, which restarts a failed run so many times; `ranks=None`
        starts one process without a launcher. `faults`: see faulty_pretrain.py."""
        words = [str(script), "--config", str(self.folder / "config.json"), *arguments]
        if ranks is None:
            command = [sys.executable, *words]
        else:
            options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
            signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
            command = [*TORCHRUN, *options, "--signals-to-handle", signals, *words]
        injected = json.dumps({"folder": str(self.folder), "faults": list(faults)})
        for note in self.folder.glob("fault-*.json"):
            note.unlink()
        self.launch(command, MEGASPARSE_FAULTS=injected)

    def launch(self, command: list[str], **environment: str) -> None:
        self.starts += 1
        self.began = time.monotonic()
        self.shared_memory = set(os.listdir("/dev/shm"))
        threads = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | threads | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> Path:
        return self.folder / f"log-{self.starts}.txt"

    @property
    def launcher(self) -> int:
        assert self.process is not None
        return self.process.pid

    def rank(self, number: int) -> int:
        return int((self.folder / f"rank-{number}.pid").read_text())

    def note(self, number: int) -> dict[str, Any] | None:
        """Record of a fault: event, time, rank, pids of all ranks by `rank-NUMBER`."""
        try:
            return dict(json.loads((self.folder / f"fault-{number}.json").read_text()))
        except FileNotFoundError:
            return None

    def wait_for_fault(self, number: int) -> dict[str, Any]:
        self.wait_until(lambda: self.note(number) is not None)
        note = self.note(number)
        assert note is not None
        return note

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: max(self.losses(), default=0) >= step)

    def wait_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not true():
            assert self.process is not None and self.process.poll() is None, f"it has ended:\n{self.said()}"
            assert time.monotonic() < deadline, f"nothing in {LIMIT} s:\n{self.said()}"
            time.sleep(0.01)

    def wait(self, since: float | None = None, limit: float = LIMIT) -> Ended:
        """Until the launcher has ended. `since`: of time.monotonic()."""
        assert self.process is not None
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit} s:\n{self.said()}") from None
        seconds = time.monotonic() - (self.began if since is None else since)
        return Ended(self.process.returncode, seconds, self.said())

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def losses(self) -> dict[int, str]:
        """Step -> loss to its last bit, from metrics.jsonl, whose last line may be cut short at any moment."""
        found: dict[int, str] = {}
        with suppress(FileNotFoundError):
            for line in (self.directory / "metrics.jsonl").read_text().splitlines():
                with suppress(ValueError):
                    values = json.loads(line)
                    found[values["step"]] = float(values["train/loss"]).hex()
        return found

    def checkpoints(self) -> list[int]:
        return [int(path.name) for path in list_checkpoints(self.directory / "checkpoints")]

    def first_steps(self) -> list[int]:
        """The first step that rank 0 trained, in each of the starts in which it came that far."""
        found: dict[str, int] = {}
        with suppress(FileNotFoundError):
            for line in (self.folder / "samples-0.txt").read_text().splitlines():
                pid, step, *_ = line.split()
                found.setdefault(pid, int(step))
        return list(found.values())

    def samples(self, ranks: int = 2) -> dict[int, dict[int, int]]:
        """Step -> global sample number -> crc32 of its tokens, as each rank read it when it last did this step."""
        found: dict[int, dict[int, int]] = {}
        for rank in range(ranks):
            last: dict[int, tuple[int, dict[int, int]]] = {}
            path = self.folder / f"samples-{rank}.txt"
            for line in path.read_text().splitlines() if path.exists() else []:
                pid, step, sample, crc = map(int, line.split())
                if last.get(step, (0, {}))[0] != pid:
                    last[step] = (pid, {})
                assert sample not in last[step][1], f"rank {rank} took sample {sample} twice in step {step}"
                last[step][1][sample] = crc
            for step, (_, samples) in last.items():
                twice = found.setdefault(step, {}).keys() & samples.keys()
                assert not twice, f"step {step}: samples {twice} on several ranks"
                found[step] |= samples
        return found

    def leftovers(self) -> list[str]:
        """Processes of this run that still live: their command lines."""
        return [_command(pid) for pid in self.processes()]

    def new_shared_memory(self) -> set[str]:
        """Return shared memory that no process maps; parallel tests map their own."""
        new = set(os.listdir("/dev/shm")) - self.shared_memory
        used, left = _mapped_shared_memory(), set()
        for name in new:
            with suppress(FileNotFoundError):
                if os.stat(f"/dev/shm/{name}").st_ino not in used:
                    left.add(name)
        return left

    def kill_all(self) -> None:
        """SIGKILL to the launcher and every rank, as near to at once as can be."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def processes(self) -> list[int]:
        """Process ids of the launcher, the ranks, and whatever they have started."""
        mark = json.dumps({"folder": str(self.folder)})[:-1].encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if mark in (entry / "environ").read_bytes() and is_alive(int(entry.name)):
                        found.append(int(entry.name))
        return sorted(found)


@contextmanager
def running(*runs: Run) -> Iterator[None]:
    """Whatever the test does, no process of these runs is left after it."""
    try:
        yield
    finally:
        for run in runs:
            run.kill_all()


def fault(on: str, *do: str, rank: int | None = None, every: bool = False) -> Fault:
    return {"on": on, "do": do, "every": every} | ({} if rank is None else {"rank": rank})


def patience() -> float:
    """By how much limits of time are to be stretched because this machine is doing other things too; 1 where not."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_complete(checkpoint: Path) -> bool:
    """It has its manifest and every file in full length; quick enough to ask every 10 ms."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        return all((checkpoint / name).stat().st_size == file["bytes"] for name, file in files.items())
    except (OSError, ValueError):
        return False


def _mapped_shared_memory() -> set[int]:
    """Inodes of /dev/shm that some living process has mapped; a semaphore's mapping does not have its name."""
    found: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            lines = maps.read_text().splitlines()
            found |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return found


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return f"process {pid}"
