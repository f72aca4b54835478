"""Tables of numbers by date, and runs that forecast them, for tests."""

import csv
import math
import random
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks.readers.series import Series

START = datetime(2019, 12, 30, 5)
HOUR = timedelta(hours=1)
COLUMNS = ("load", "wind", "OT")
FORECASTER: dict[str, Any] = {
    "kind": "encoder_decoder", "vocabulary": 1, "max_length": 16, "layers": 1, "d_model": 16, "d_ff": 24, "heads": 2,
    "blocks": "ordinary", "activations": "stored", "dropout": 0.1, "attention": {"pattern": ["full"]},
    "source": {"length": 24, "layers": 2, "attention": {"pattern": [{"local": 1, "lha": 1}], "lha": {"chunk": 4}}},
}  # fmt: skip
"""For `model` of a run that reads 12 rows."""
TASK: dict[str, Any] = {"name": "series", "max_length": 12, "forecast": {"horizon": 4, "overlap": 6, "targets": ["OT"]}}


def numbers(rows: int, seed: int = 0) -> list[list[float]]:
    """A day's wave with noise, of three columns of different means and spreads."""
    drawn = random.Random(seed)
    waves = ([math.sin(i * math.pi / 12 + c) + drawn.gauss(0, 0.2) for c in range(3)] for i in range(rows))
    return [[10 * c + (c + 1) * value for c, value in enumerate(wave)] for wave in waves]


def write(file: Path, values: list[list[Any]], start: datetime = START, step: timedelta = HOUR) -> Path:
    with open(file, "w", encoding="utf-8", newline="") as stream:
        out = csv.writer(stream)
        out.writerow(["date", *COLUMNS])
        out.writerows([str(start + step * i), *row] for i, row in enumerate(values))
    return file


def series(file: Path, **changes: Any) -> Series:
    """The task of a training file: of 12 rows read, 4 are forecast. changes: of `forecast`, or of max_length."""
    settings = {"horizon": 4, "overlap": 6, **changes}
    length = settings.pop("max_length", 12)
    return Series(TaskConfig.model_validate({"source": str(file), "max_length": length, "forecast": settings}))
