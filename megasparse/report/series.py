"""Scalars of a run out of metrics.jsonl, and few enough points of them to draw."""

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HUGE = 1e300
"""Largest value that counts as a measurement; a larger one has no finite square."""


class Series(NamedTuple):
    """A scalar over steps: (n,) int64 ascending, and (n,) float64, NaN where it was not finite."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def finite(self) -> np.ndarray:
        return self.values[np.isfinite(self.values)]


def read_series(path: Path) -> dict[str, Series]:
    """Every scalar of a metrics.jsonl by its name; none where there is no file. What is no line of a step, such as one
    that a crash cut short, is passed over. Raises OSError.
    """
    steps: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
    values: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
    for line in read_lines(path):
        step = line.get("step")
        if not isinstance(step, int) or not 0 <= step < 1 << 62:
            continue
        for name, value in line.items():
            if name != "step" and (value is None or (type(value) in (int, float) and abs(value) < HUGE)):
                steps[name].append(step)
                values[name].append(math.nan if value is None else value)
    return {name: _ascending(np.array(steps[name]), np.array(values[name])) for name in steps}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, without those that are none; nothing where there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found


def _ascending(steps: np.ndarray, values: np.ndarray) -> Series:
    """The series in the order of steps; of a step that comes twice, its last value."""
    if len(steps) > 1 and (np.diff(steps) <= 0).any():
        own, last = np.unique(steps[::-1], return_index=True)
        return Series(own, values[::-1][last])
    return Series(steps, values)


def decimated(series: Series, points: int) -> Series:
    """At most `points` points of a series: the smallest and the largest value of each of equally long stretches."""
    count = len(series.steps)
    if count <= points:
        return series
    kept = {0, count - 1}
    for part in np.array_split(np.arange(count), max(1, points // 2 - 1)):
        own = series.values[part]
        known = part[np.isfinite(own)]
        if len(known):
            kept |= {int(known[series.values[known].argmin()]), int(known[series.values[known].argmax()])}
        else:
            kept.add(int(part[0]))
    places = np.array(sorted(kept))
    return Series(series.steps[places], series.values[places])


def smoothed(series: Series, width: int) -> Series:
    """Running means over `width` points, of those that are finite; NaN where none is."""
    finite = np.isfinite(series.values)
    sums, counts = (
        np.concatenate([[0.0], np.cumsum(x, dtype=np.float64)]) for x in (np.where(finite, series.values, 0.0), finite)
    )
    places = np.arange(len(finite))
    first, last = np.maximum(0, places - width // 2), np.minimum(len(finite), places + width // 2 + 1)
    number = counts[last] - counts[first]
    means = np.divide(sums[last] - sums[first], number, out=np.full(len(finite), np.nan), where=number > 0)
    return Series(series.steps, means)
