"""Twenty minutes of faults at random: the run ends as the run that nobody disturbed, and nothing piles up."""

import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.faults import Run, fault, running

MINUTES = float(os.environ.get("MEGASPARSE_SOAK_MINUTES", "20"))
MEAN = 30.0
"""Seconds between faults."""
EVERY = 10
WARM, SHORT = 300, 20
"""Steps of a process after which its memory stands still, and after which its files and threads do."""


@dataclass(frozen=True)
class Sample:
    """What a process holds at a step."""

    pid: int
    step: int
    megabytes: float
    files: int
    threads: int


def look_at(pid: int, step: int) -> Sample:
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(pid, step, int(fields["VmRSS"].split()[0]) / 1024, files, int(fields["Threads"]))


def slope(samples: list[Sample]) -> float:
    """Megabytes in 1,000 steps, by least squares with each process's own beginning."""
    up = across = 0.0
    for pid in {sample.pid for sample in samples}:
        steps = np.array([sample.step for sample in samples if sample.pid == pid], dtype=float)
        sizes = np.array([sample.megabytes for sample in samples if sample.pid == pid])
        up += float(((steps - steps.mean()) * (sizes - sizes.mean())).sum())
        across += float(((steps - steps.mean()) ** 2).sum())
    return 1000 * up / across


class Driver:
    """Does harm to a supervised run, and starts it again where a signal has ended it well, as a cluster would."""

    def __init__(self, run: Run, seed: int):
        self.run, self.draw = run, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self.launchers: list[Sample] = []
        self.asked_to_stop = False
        """The launcher was: then it does not start a rank again that hangs or dies before it has saved."""

    def start(self) -> None:
        self.asked_to_stop = False
        slow = fault("forward", "sleep 0.1", every=True)
        self.run.start(faults=[slow], supervise=["--restarts", "5"])

    def drive(self, seconds: float) -> None:
        ending = time.monotonic() + seconds
        self.start()
        while (now := time.monotonic()) < ending:
            self.watch_until(min(now + self.draw.expovariate(1 / MEAN), ending))
            self.harm()
        self.end()

    def watch_until(self, moment: float) -> None:
        """Looks at all processes once a second."""
        while time.monotonic() < moment:
            time.sleep(1.0)
            if self.run.process is not None and self.run.process.poll() is not None:
                assert self.run.process.returncode == 0 or self.asked_to_stop, self.run.said()
                self.start()
            step = max(self.run.losses(), default=0)
            with suppress(OSError, ValueError, KeyError):
                self.launchers.append(look_at(self.run.launcher, step))
                self.samples += [look_at(self.run.rank(rank), step) for rank in range(2)]

    def harm(self) -> None:
        how, rank = self.draw.choice(["kill", "stop", "term", "exception"]), self.draw.randrange(2)
        self.done[how] += 1
        with suppress(ProcessLookupError, FileNotFoundError):
            if how == "exception":
                (self.run.folder / f"ask-{rank}").write_text("raise a random exception")
            else:
                pid = self.run.launcher if how == "term" and rank else self.run.rank(rank)
                self.asked_to_stop |= pid == self.run.launcher
                if pid in self.run.processes():
                    os.kill(pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[how])

    def end(self) -> None:
        """Let it go on to a step that is saved, without another fault."""
        for rank in range(2):
            (self.run.folder / f"ask-{rank}").unlink(missing_ok=True)
        assert self.run.process is not None
        newest = max(self.run.checkpoints(), default=0)
        while max(self.run.checkpoints(), default=0) < newest + 2 * EVERY:
            self.watch_until(time.monotonic() + 1)
        os.kill(self.run.launcher, signal.SIGTERM)
        assert self.run.wait().code == 0, self.run.said()


@pytest.mark.soak
def test_a_run_under_random_faults_ends_as_one_without(data, tmp_path, figures):
    sections: dict[str, dict[str, Any]] = {
        "run": {"hang_timeout": 5.0},
        "training": {"steps": 1_000_000},
        "checkpoint": {"every": EVERY, "asynchronous": True},
    }
    run, straight = Run(tmp_path / "harmed", data, **sections), Run(tmp_path / "straight", data, **sections)
    with running(run, straight):
        driver = Driver(run, seed=0)
        began, memory = time.monotonic(), set(os.listdir("/dev/shm"))
        driver.drive(60 * MINUTES)
        seconds = time.monotonic() - began
        assert run.leftovers() == [] and set(os.listdir("/dev/shm")) <= memory
        losses = run.losses()
        last = max(losses)

        straight.start("--stop-at", str(max(last, 5 * WARM)))
        steady = []
        while straight.process is not None and straight.process.poll() is None:
            step = max(straight.losses(), default=0)
            with suppress(OSError, ValueError, KeyError):
                steady += [look_at(straight.rank(rank), step) for rank in range(2)]
            time.sleep(1.0)
        assert straight.wait().code == 0, straight.said()

    times = [
        json.loads(line)["speed/step_seconds"] for line in (run.directory / "metrics.jsonl").read_text().splitlines()
    ]
    undisturbed = straight.losses()
    differences = sum(undisturbed.get(step) != loss for step, loss in losses.items())
    growth = slope(warmed(steady, WARM))
    figures(**{f"faults_{how}": number for how, number in driver.done.items()})
    figures(
        steps=last,
        bit_differences=differences,
        goodput_ratio=last * statistics.median(times) / seconds,
        memory_in_1000_steps_slope=growth,
    )
    assert sorted(losses) == list(range(1, last + 1)) and differences == 0
    assert run.samples() == {step: found for step, found in straight.samples().items() if step <= last}
    assert growth < 1.0
    lasting = [*warmed([*driver.samples, *steady], SHORT), *driver.launchers]
    launchers = {sample.pid for sample in driver.launchers}
    for pid in {sample.pid for sample in lasting}:
        own = [sample for sample in lasting if sample.pid == pid]
        begin, end = own[: len(own) // 2], own[len(own) // 2 :]
        pipes = 2 * (pid in launchers)  # one to each rank in reserve, while it waits
        if begin:
            assert statistics.median(s.files for s in end) <= statistics.median(s.files for s in begin) + 1 + pipes, own
            assert statistics.median(s.threads for s in end) <= statistics.median(s.threads for s in begin) + 1, own


def warmed(samples: list[Sample], steps: int) -> list[Sample]:
    """Those of processes that have done so many steps."""
    first = {sample.pid: sample.step for sample in reversed(samples)}
    return [sample for sample in samples if sample.step >= first[sample.pid] + steps]
