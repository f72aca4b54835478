"""The script launch/pretrain.py with faults at points that a test chooses; tests/helpers/faults.py starts it.

MEGASPARSE_FAULTS is a JSON object: `folder` for notes, and `faults`, a list of
    {"on": regular expression, "do": [act, ...], "rank": only this one, "every": true}
An event that the expression finds makes the acts happen. Faults happen in the order of the list, each once in all
starts of the run together, and leave the note `fault-NUMBER.json`; those with `every` happen each time, without one.

    start                                  main begins
    handled                                signals are handled from here on; nothing big is imported yet
    build                                  the model is about to be built
    forward STEP, evaluate                 before each forward of training, of evaluation
    read NUMBER THREAD                     before each read of tokens
    write PATH, synced PATH                a checkpoint's file is about to be opened, has reached the disk
    rename PATH PATH, remove NAME          before it happens

Acts: kill, stop (SIGKILL and SIGSTOP to itself), sleep SECONDS [to SECONDS], raise MESSAGE, gil (lock a locked
mutex, which a signal does not interrupt, and let no other thread run).

Each rank also appends the samples that it trains on to `samples-RANK.txt`: process id, step, sample number, crc32."""

import ctypes
import itertools
import json
import os
import random
import re
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch import pretrain
from megasparse.training.stopping.signals import StopSignals

WRITING = os.O_WRONLY | os.O_RDWR


class Injected(Exception):
    """Error of the fault `raise`."""


class Faults:
    def __init__(self, folder: Path, faults: list[dict[str, Any]], rank: int):
        self.folder, self.faults, self.rank = folder, faults, rank
        (folder / f"rank-{rank}.pid").write_text(str(os.getpid()))
        for path in folder.glob("rank-*.pid"):  # of an earlier start, with more ranks
            if int(path.stem.split("-")[1]) >= int(os.environ.get("WORLD_SIZE", "1")):
                path.unlink()

    def happen(self, event: str) -> None:
        waiting = False  # of faults that happen once, only the first that has not happened is waited for
        for number, fault in enumerate(self.faults):
            note = self.folder / f"fault-{number}.json"
            if not fault.get("every"):
                if waiting or note.exists():
                    continue
                waiting = True
            if fault.get("rank", self.rank) != self.rank or not re.search(fault["on"], event):
                continue
            if not fault.get("every"):
                self._leave(note, event)
            for act in fault["do"]:
                self._act(act)

    def _leave(self, note: Path, event: str) -> None:
        pids = {path.stem: int(path.read_text() or 0) for path in self.folder.glob("rank-*.pid")}
        text = json.dumps({"event": event, "time": time.time(), "rank": self.rank, "pids": pids})
        temporary = note.with_suffix(f".{self.rank}")
        temporary.write_text(text)
        temporary.rename(note)

    def _act(self, act: str) -> None:
        what, *rest = act.split(" ", 1)
        argument = rest[0] if rest else ""
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "sleep":
            bounds = [float(bound) for bound in argument.split(" to ")]
            time.sleep(random.uniform(bounds[0], bounds[-1]))
        elif what == "raise":
            raise Injected(argument)
        elif what == "gil":
            ctypes.PyDLL(None).pthread_mutex_lock(ctypes.create_string_buffer(b"\1", 64))  # PyDLL keeps the GIL
        else:
            raise AssertionError(act)


def watch_files(faults: Faults) -> None:
    """Report every access to a checkpoint's files by the interpreter's audit of system calls."""

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open":
            path, mode, flags = arguments  # `open` with an opener is reported twice, by os.open without a mode
            if (
                mode is None
                and isinstance(path, str | os.PathLike)
                and flags & WRITING
                and "/checkpoints/" in os.fspath(path)
            ):
                faults.happen(f"write {os.fspath(path)}")
        elif name == "os.rename":
            if "/checkpoints/" in str(arguments[0]):
                faults.happen(f"rename {arguments[0]} {arguments[1]}")
        elif name == "os.remove":
            faults.happen(f"remove {arguments[0]}")

    sys.addaudithook(audit)
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if "/checkpoints/" in path:
            faults.happen(f"synced {path}")

    os.fsync = fsync  # type: ignore[assignment]


def watch_model(faults: Faults) -> None:
    from megasparse.model import build
    from megasparse.runs import pretraining

    samples = (faults.folder / f"samples-{faults.rank}.txt").open("a")
    deferred_model = build.deferred_model

    def before(module: Any, arguments: tuple[Any, ...]) -> None:
        tokens, rng = arguments[:2]
        if not rng.training:
            faults.happen("evaluate")
            return
        for sample, row in zip(rng.samples.tolist(), tokens.cpu().numpy(), strict=True):
            samples.write(f"{os.getpid()} {rng.step} {sample} {zlib.crc32(row.tobytes())}\n")
        samples.flush()
        faults.happen(f"forward {rng.step}")

    def build_and_watch(*arguments: Any) -> Any:
        faults.happen("build")
        model = deferred_model(*arguments)
        model.register_forward_pre_hook(before)
        return model

    for holder in (build, pretraining):
        holder.deferred_model = build_and_watch  # type: ignore[attr-defined]


def watch_data(faults: Faults) -> None:
    from megasparse.data.reader import ShardReader

    read, numbers = ShardReader.read, itertools.count(1)

    def counted(self: ShardReader, shard: int, start: int, stop: int) -> Any:
        faults.happen(f"read {next(numbers)} {threading.current_thread().name}")
        return read(self, shard, start, stop)

    ShardReader.read = counted  # type: ignore[method-assign]


def main() -> None:
    asked_for = json.loads(os.environ["MEGASPARSE_FAULTS"])
    faults = Faults(Path(asked_for["folder"]), asked_for["faults"], int(os.environ.get("RANK", "0")))
    follow_launcher = StopSignals.follow_launcher

    def then_watch(self: StopSignals) -> None:
        follow_launcher(self)
        faults.happen("handled")
        watch_files(faults)
        watch_model(faults)  # imports torch, as the script does next
        watch_data(faults)

    StopSignals.follow_launcher = then_watch  # type: ignore[method-assign]
    faults.happen("start")
    pretrain.main()


if __name__ == "__main__":
    main()
