"""How long a run stands still when a rank dies, and whether anything is lost: random kills of a supervised run.

    python -m tests.reliability.recovery --kills 100 --json docs/measured/recovery.json
    python -m tests.reliability.recovery --every 600 --minutes 60 --json docs/measured/goodput.json

A tiny model on two ranks, a checkpoint every other step. Each kill is a SIGKILL of one rank, drawn with the moment (up
to 5 s after the ranks of the start have done a step and those in reserve are there). The seconds from it to the end of
the first new step are split as they pass on the slower rank; the CPU seconds are those of that rank's process from its
beginning on. In the end every loss is compared, to the bit, with those of a run that nothing happened to, and every
sample. --cold: with no ranks in reserve.

--every: a kill in the middle of each so many seconds in place of that, a checkpoint every 50th step. Goodput is the
share of the wall time, from the first step on, that passed in steps whose results were kept.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import torch

from tests.helpers.faults import SUPERVISE, Run, is_alive
from tests.helpers.trained import prepared
from tools.bench.measuring import machine

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "timed_pretrain.py"
PHASES = ("begun", "imported", "met", "opened", "ready", "stepped")
NAMES = {"begun": "start", "imported": "import", "met": "meet", "opened": "read", "ready": "build", "stepped": "step"}
STEPS_AFTER = 4
SAVE_EVERY = 50
"""Steps between two checkpoints where goodput is measured."""
COLD = """
import runpy, sys
from megasparse.training import supervisor
supervisor.Supervisor._prepare_spares = lambda self: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
RANKS = 2
Mark = dict[str, Any]


def start(run: Run, warm: bool, stop: int | None = None) -> None:
    """Start it, to the end or to a step."""
    command = [
        sys.executable,
        *([] if warm else ["-c", COLD]),
        str(SUPERVISE),
        "--ranks",
        str(RANKS),
        "--restarts",
        "3",
        str(SCRIPT),
    ]
    command += ["--config", str(run.folder / "config.json")]
    command += ["--stop-at", str(stop)] if stop is not None else []
    run.launch(command, MEGASPARSE_FAULTS=json.dumps({"folder": str(run.folder), "faults": []}))


def marks(run: Run) -> list[dict[str, Mark]]:
    """What each start of a rank has come to: mark -> line, in the order in which they began."""
    found: dict[int, dict[str, Mark]] = {}
    path = run.folder / "marks.txt"
    for line in path.read_text().splitlines() if path.exists() else ():
        one = json.loads(line)
        found.setdefault(one["pid"], {})[one["what"]] = one
    return list(found.values())


def stepped(run: Run) -> list[dict[str, Mark]]:
    """Those of the last start of every rank, where both have done a step."""
    newest = {one["begun"]["rank"]: one for one in marks(run) if "begun" in one}
    return list(newest.values()) if len(newest) == RANKS and all("stepped" in one for one in newest.values()) else []


def spares(run: Run) -> int:
    """Ranks in reserve that have imported everything: they wait for a line."""
    ranks, found = {run.rank(rank) for rank in range(RANKS)}, 0
    for pid in set(run.processes()) - ranks:
        with suppress(OSError):
            waits = "pipe_read" in Path(f"/proc/{pid}/wchan").read_text()
            found += waits and b"megasparse.runs.spare" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return found


def kill(run: Run, draw: random.Random, reserve: int) -> dict[str, Any]:
    """Kill a rank at a random moment, and measure until the first step of the next start."""
    run.wait_until(lambda: bool(stepped(run)) and spares(run) == reserve)
    time.sleep(draw.uniform(0, 5))
    before, rank = {one["begun"]["pid"] for one in stepped(run)}, draw.randrange(RANKS)
    victim, other = run.rank(rank), run.rank(1 - rank)
    os.kill(victim, signal.SIGKILL)
    died, lost = time.time(), max(run.losses())
    while is_alive(other):
        time.sleep(0.002)
    ended = time.time()
    run.wait_until(lambda: bool(new := stepped(run)) and not before & {one["begun"]["pid"] for one in new})
    slowest = max(stepped(run), key=lambda one: one["stepped"]["time"])
    seconds, cpu = {"detect and end": ended - died}, {}
    last, last_cpu = ended, slowest["begun"]["cpu"]
    for phase in PHASES:
        seconds[NAMES[phase]] = slowest[phase]["time"] - last
        cpu[NAMES[phase]] = slowest[phase]["cpu"] - last_cpu
        last, last_cpu = slowest[phase]["time"], slowest[phase]["cpu"]
    seconds["whole"] = slowest["stepped"]["time"] - died
    return {"rank": rank, "after_step": lost, "load": os.getloadavg()[0], "seconds": seconds, "cpu_seconds": cpu}


def measure(kills: int, seed: int, warm: bool, folder: Path) -> dict[str, Any]:
    draw, data = random.Random(seed), prepared(folder)
    sections = {"training": {"steps": 100_000}, "checkpoint": {"every": 2}}
    killed, straight = (Run(folder / name, data, **sections) for name in ("killed", "straight"))
    try:
        start(killed, warm)
        found = [kill(killed, draw, RANKS * warm) for _ in range(kills)]
        last = max(killed.losses()) + STEPS_AFTER
        killed.wait_for_step(last)
        os.kill(killed.launcher, signal.SIGTERM)
        assert killed.wait().code == 0, killed.said()
        last = max(killed.losses())
        start(straight, False, last)
        assert straight.wait(limit=3600).code == 0, straight.said()
    finally:
        killed.kill_all()
        straight.kill_all()
    one, other = killed.losses(), straight.losses()
    mine, theirs = killed.samples(), straight.samples()
    assert sorted(other) == sorted(theirs) == list(range(1, last + 1))
    return {
        "date": date.today().isoformat(),
        "seed": seed,
        "ranks_in_reserve": RANKS * warm,
        "kills": kills,
        "resumes": len(killed.first_steps()) - 1,
        "steps": last,
        "differing_losses": sum(one.get(step) != loss for step, loss in other.items()),
        "lost_or_repeated_samples": sum(mine.get(step) != samples for step, samples in theirs.items()),
        "median_seconds": medians([each["seconds"] for each in found]),
        "longest_seconds": max(each["seconds"]["whole"] for each in found),
        "median_cpu_seconds": medians([each["cpu_seconds"] for each in found]),
        "each": found,
        "machine": machine(torch.device("cpu")),
    }


def goodput(minutes: float, every: float, seed: int, warm: bool, folder: Path) -> dict[str, Any]:
    draw = random.Random(seed)
    run = Run(folder / "killed", prepared(folder), training={"steps": 1_000_000}, checkpoint={"every": SAVE_EVERY})
    try:
        start(run, warm)
        run.wait_until(lambda: bool(stepped(run)))
        began, found = time.time(), []
        for number in range(round(60 * minutes / every)):
            time.sleep(max(0.0, began + (number + 0.5) * every - time.time()))
            found.append(kill(run, draw, RANKS * warm))
        time.sleep(max(0.0, began + 60 * minutes - time.time()))
        os.kill(run.launcher, signal.SIGTERM)
        assert run.wait().code == 0, run.said()
        seconds = time.time() - began
    finally:
        run.kill_all()
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    kept = [line["speed/step_seconds"] for line in lines]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return {
        "date": date.today().isoformat(),
        "seed": seed,
        "ranks_in_reserve": RANKS * warm,
        "kills": len(found),
        "seconds_between_kills": every,
        "seconds": seconds,
        "steps": len(kept),
        "steps_between_checkpoints": SAVE_EVERY,
        "median_step_seconds": statistics.median(kept),
        "goodput": sum(kept[1:]) / seconds,  # the clock began after the first
        "median_seconds": medians([each["seconds"] for each in found]),
        "longest_seconds": max(each["seconds"]["whole"] for each in found),
        "each": found,
        "machine": machine(torch.device("cpu")),
    }


def medians(each: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in each) for name in each[0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--every", type=float, metavar="SECONDS")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if args.every is None:
            result = measure(args.kills, args.seed, not args.cold, Path(temporary))
        else:
            result = goodput(args.minutes, args.every, args.seed, not args.cold, Path(temporary))
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "each"}, indent=1))
