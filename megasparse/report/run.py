"""A run's folder, read in whatever state it is: running, crashed, or not begun."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import Config, ModelConfig
from megasparse.errors import DataError
from megasparse.report.chart import Mark
from megasparse.report.pictures import Shown, read_board
from megasparse.report.series import Series, read_lines, read_series
from megasparse.training.checkpoints.manifest import flatten, list_checkpoints

FRESH = 60.0
"""Seconds after its last heartbeat for which a run counts as alive."""
KINDS = {
    "SKIPPED": "skipped",
    "loss spike": "spike",
    "straggler": "straggler",
    "damaged": "damaged",
    "started again": "restart",
}
"""A part of an event's message -> what is drawn for it; the first that fits."""


@dataclass(frozen=True)
class Run:
    path: Path
    config: dict[str, Any]
    """Flat: dotted key -> value."""
    defaults: dict[str, Any]
    """The defaults, in the same form."""
    series: dict[str, Series]
    events: list[dict[str, Any]]
    heartbeats: list[dict[str, Any]]
    ranks: dict[str, Any]
    """The content of ranks.json."""
    best: dict[str, Any]
    """The content of best.json of a fine-tuning run."""
    checkpoints: list[tuple[str, int, float]]
    """Name, bytes, when it was written."""
    traces: list[str]
    board: dict[str, list[Shown]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def finetuning(self) -> bool:
        return any(key.split(".")[0] == "task" for key in self.config)

    @property
    def steps(self) -> int:
        """Steps done."""
        return max((int(own.steps[-1]) for own in self.series.values() if len(own.steps)), default=0)

    @property
    def planned(self) -> int:
        """Steps of the whole run; 0 where that is not known."""
        value = self.config.get("training.steps")
        return value if isinstance(value, int) else 0

    def finite(self, name: str) -> np.ndarray:
        """The finite values of a scalar; none where it is not logged."""
        return self.series[name].finite if name in self.series else np.empty(0)

    def last(self, name: str) -> float | None:
        """The last finite value of a scalar."""
        known = self.finite(name)
        return float(known[-1]) if len(known) else None

    def marks(self) -> list[Mark]:
        return [
            Mark(event["step"], kind_of(event), str(event.get("message", "")))
            for event in self.events
            if isinstance(event.get("step"), int)
        ]

    def alive(self) -> bool:
        """Whether a rank's heartbeat is fresh."""
        return any(not beat.get("ended") and time.time() - beat["seen"] < FRESH for beat in self.heartbeats)


def kind_of(event: dict[str, Any]) -> str:
    message = str(event.get("message", ""))
    return next((kind for word, kind in KINDS.items() if word in message), "other")


def read_run(path: Path) -> Run:
    """Raises DataError where there is no run, or it cannot be read."""
    if not any((path / name).is_file() for name in ("config.json", "metrics.jsonl")):
        what = "has neither config.json nor metrics.jsonl" if path.is_dir() else "is no folder"
        raise DataError(path, f"no run: it {what}", "Give the run.directory of a pretraining or fine-tuning run")
    config = _json(path / "config.json")
    defaults = (FinetuneConfig if "task" in config else Config)().model_dump(mode="json")
    if config.get("model"):
        defaults["model"] = ModelConfig().model_dump(mode="json")
    try:
        return Run(
            path=path,
            config=flatten(config) if config else {},
            defaults=flatten(defaults),
            series=read_series(path / "metrics.jsonl"),
            events=list(read_lines(path / "events.jsonl")),
            heartbeats=_heartbeats(path / "heartbeats"),
            ranks=_json(path / "ranks.json"),
            best=_json(path / "best.json"),
            checkpoints=[_checkpoint(each) for each in list_checkpoints(path / "checkpoints")],
            traces=sorted(each.name for each in (path / "traces").glob("*.json.gz")),
            board=read_board(path / "tensorboard"),
        )
    except OSError as error:
        raise DataError(
            error.filename or path, f"cannot be read ({error.strerror})", "Make it readable, and try again"
        ) from None


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _heartbeats(folder: Path) -> list[dict[str, Any]]:
    """Heartbeats of the newest launch, by rank; `seen` is when the file was written."""
    found = []
    for file in sorted(folder.glob("rank-*.json")):
        beat = _json(file).get("heartbeat")
        if isinstance(beat, dict):
            found.append({**beat, "seen": file.stat().st_mtime})
    newest = max(found, key=lambda beat: beat["seen"], default={}).get("launch")
    return [beat for beat in found if beat.get("launch") == newest]


def _checkpoint(folder: Path) -> tuple[str, int, float]:
    files = [file.stat() for file in folder.rglob("*") if file.is_file()]
    return folder.name, sum(file.st_size for file in files), folder.stat().st_mtime
