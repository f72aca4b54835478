"""What metrics.jsonl and the checkpoints of a folder say of each other: a run goes on only where both are of one."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from megasparse.errors import CheckpointError
from megasparse.training.checkpoints.checkpoint import Checkpoint

METRICS = "metrics.jsonl"


def check_records(directory: Path, start: Checkpoint | None, resume: str) -> None:
    """Raise CheckpointError where `directory`/metrics.jsonl contradicts the checkpoint that its run goes on from: its
    loss is not that of the step's line, or there is no checkpoint although one must have been saved. resume: see
    `find_start`.

    Steps after the checkpoint are done again, and their lines cut. Where they are more than the end of a run can cost,
    and where steps before it have no line, that is reported.
    """
    path = directory / METRICS
    last, line = _lines(path, start.step if start else 0)
    saved = _saved_for_certain(directory, last) if resume == "auto" else 0
    gone = f"{path} has come to step {last}, and the checkpoint of step {saved} is not there"
    if start is None:
        if saved:
            hint = "Put it back, or begin anew: --resume never, or another run.directory"
            raise CheckpointError(directory / "checkpoints", f"{gone}, nor any other", hint)
        return
    if saved > start.step:
        _report(f"{gone}: going on from step {start.step}")
    if last < start.step and path.exists():
        _report(f"{path} ends at step {last}, before the checkpoint: steps {last + 1} to {start.step} have no line")
    loss, found = _last_loss(start), line.get("train/loss")
    if loss is not None and found is not None and loss != found:
        problem = f"the loss of step {start.step} is {loss} here and {found} in {path}: they are not of one run"
        raise CheckpointError(start.path, problem, f"Move {path.name} away, or choose another run.directory")


def _last_loss(checkpoint: Checkpoint) -> float | None:
    """The loss of the checkpoint's step; None where that step was left out, as then its loss is not kept."""
    guard = checkpoint.state.get("loss_guard", {})
    losses = guard.get("losses")
    return losses[-1] if losses and not guard.get("skipped_in_a_row") else None


def _lines(path: Path, step: int) -> tuple[int, dict[str, Any]]:
    """The last step that has a whole line, 0 where none has, and the line of `step`, {} where it has none."""
    last, found = b"", b""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                last = line
                if line.startswith(b'{"step": %d,' % step):
                    found = line
    return int(_read(last).get("step", 0)), _read(found)


def _read(line: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        value = json.loads(line)
        return value if isinstance(value, dict) else {}
    return {}


def _saved_for_certain(directory: Path, last: int) -> int:
    """The newest step that the run before, which came to step `last`, must have saved; 0 where none must have been."""
    try:
        settings = json.loads((directory / "config.json").read_bytes())["checkpoint"]
        every, waits = int(settings["every"]), bool(settings["asynchronous"])
        if settings["on_failure"] != "stop":
            return 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    if every <= 0:
        return 0
    newest = (last - 1) // every * every  # a step has its line before it is saved
    return max(0, newest - every * waits)  # and what is written beside training must be there by the next save


def _report(line: str) -> None:
    print(line, file=sys.stderr)
