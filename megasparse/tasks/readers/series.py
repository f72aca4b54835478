"""Forecasts of time series (ETT, Electricity and others), and the features of their dates."""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megasparse.config.finetuning import ForecastConfig, TaskConfig
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.readers.rows import comma_separated, field, parse_number, strict
from megasparse.tasks.task import Example, SourceLocation, Task, parts_of, split_name

HOUR = 3600.0  # seconds per hour
HINT = "Sort the rows by time, one per step, and fill the gaps"
DATE_HINT = "Write it as 2016-07-01 13:00:00"
NUMBER_HINT = "Write one, such as 3.5, or select other columns: task.forecast.inputs"


def time_features(dates: np.ndarray, step: float) -> np.ndarray:
    """Compute Informer's time features (Zhou et al. 2020), float64 (N, 4), each from −1/2 to 1/2: hour of the day/23,
    day of the week/6 (from Monday), day of the month/30 and day of the year/365 (both from 0), less 1/2 each. If the
    step is not a whole number of hours, the minute of the hour/59 precedes them, (N, 5).

    dates: (N,) datetime64. step: in seconds.
    """
    days = dates.astype("datetime64[D]")
    minutes = (dates - days) // np.timedelta64(1, "m")
    parts = [
        (minutes // 60, 23),
        ((days.astype(np.int64) + 3) % 7, 6),  # 1970-01-01 was a Thursday
        ((days - days.astype("datetime64[M]")).astype(np.int64), 30),
        ((days - days.astype("datetime64[Y]")).astype(np.int64), 365),
    ]
    if step % HOUR:
        parts.insert(0, (minutes % 60, 59))
    return np.stack([values / largest - 0.5 for values, largest in parts], axis=1)


class SeriesRows(NamedTuple):
    """Rows of a file, in its units: dates datetime64 (N,), values float64 (N, C), line numbers (N)."""

    columns: list[str]
    lines: list[int]
    dates: np.ndarray
    values: np.ndarray


OFFICIAL = {"etth1": ("ETTh1.csv", 24 * 30), "ettm1": ("ETTm1.csv", 24 * 30 * 4)}
"""Files of the electricity transformer temperature (Zhou et al. 2020), and rows of a month of 30 days."""


class Series(Task):
    """Any CSV file with a column of dates at equal steps, and columns of numbers. The source is the training file, or
    the folder of an official one.

    FILE#train, FILE#validation and FILE#test are 70, 10 and 20 % of its rows, in order; of an official file 12, 4 and 4
    months, and the rest is not used. A window may read rows of the previous part, but predicts only rows of its part.
    There is one window for every possible first row. FILE is one example without a label: its last L rows, followed by
    the forecast.

    The inputs of an example are scaled values (L, C), columns of `forecast.inputs` first, and the time features of all
    rows (L + H, F). The label is the scaled targets (H, T), the name the date of the first predicted row.
    """

    name = "series"
    metrics = ("mse", "mae")
    form: str = "forecast"

    def __init__(self, config: TaskConfig):
        """Read the training file if columns, mean, scale or step are not configured. Raises DataError too."""
        super().__init__(config)
        forecast, (self.file, self.month) = config.forecast, OFFICIAL.get(config.name, ("", 0))
        self.source_is_file, self.name = not self.file, config.name if self.file else "series"
        if None in (forecast.inputs, forecast.targets, forecast.mean, forecast.scale, forecast.step):
            forecast = self._fitted(forecast)
            self.config = config.model_copy(update={"forecast": forecast})
        self.inputs, self.targets = forecast.inputs or [], forecast.targets or []
        self.columns = list(dict.fromkeys([*self.inputs, *self.targets]))
        self.target_places = [self.columns.index(column) for column in self.targets]
        mean, scale, self.step = forecast.mean or {}, forecast.scale or {}, forecast.step or 0.0
        for column in self.columns:
            if column not in mean or column not in scale:
                hint = "Set forecast.mean and forecast.scale to null, to compute them from the training file"
                raise ConfigError("task.forecast.mean", f'or forecast.scale lacks the column "{column}"', hint)
        self.mean, self.scale = (np.array([of[column] for column in self.columns]) for of in (mean, scale))
        self.time_features = time_features(np.array(["2000-01-01"], dtype="datetime64[us]"), self.step).shape[1]

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return parts_of([folder / self.file])

    def borders(self, rows: int, file: Path) -> dict[str, tuple[int, int]]:
        """Return the first predicted row of each part, and the end of the part (as in Informer's Dataset_Custom).
        Raises DataError if the file is too short for the official splits.
        """
        train, test, month = int(rows * 0.7), int(rows * 0.2), self.month
        if not month:
            return {"train": (0, train), "validation": (train, rows - test), "test": (rows - test, rows)}
        if rows < 20 * month:
            hint = f'Use the official {self.file}, or task.name="series" for your own file'
            raise DataError(file, f"contains {rows:,} rows, but the official splits {20 * month:,}", hint)
        return {"train": (0, 12 * month), "validation": (12 * month, 16 * month), "test": (16 * month, 20 * month)}

    def read(self, file: Path) -> Iterator[Example]:
        file, part = split_name(file)
        length, horizon = self.config.max_length, self.config.forecast.horizon
        rows = read_series(file, self.config.forecast.date, self.columns, timedelta(seconds=self.step))
        count = len(rows.dates)
        if part is None and count < length:
            problem = f"contains {count} rows, but a forecast reads {length} (task.max_length)"
            raise DataError(file, problem, "Add earlier rows")
        values = (rows.values - self.mean) / self.scale
        further = rows.dates[-1] + np.timedelta64(timedelta(seconds=self.step)) * np.arange(1, horizon + 1)
        dates = np.concatenate([rows.dates, further])
        marks = time_features(dates, self.step)
        for first in [count - length] if part is None else self._begins(part, count, file):
            now = first + length
            label = None if part is None else values[now : now + horizon, self.target_places]
            inputs = (values[first:now], marks[first : now + horizon])
            yield Example(inputs, label, SourceLocation(file, rows.lines[now - 1]), str(dates[now].astype(datetime)))

    def _begins(self, part: str, rows: int, file: Path) -> range:
        """Return the first rows of a part's windows. Raises DataError if there are none."""
        length, horizon = self.config.max_length, self.config.forecast.horizon
        first, end = self.borders(rows, file)[part]
        begins = range(max(0, first - length), end - length - horizon + 1)
        if not begins:
            problem = f"{rows} rows leave {end - first} for the {part} split, too few for a window of {length} rows to "
            hint = "Use a longer file, or lower task.max_length or task.forecast.horizon"
            raise DataError(file, f"{problem}read and {horizon} to predict", hint)
        return begins

    def _fitted(self, forecast: ForecastConfig) -> ForecastConfig:
        """Complete the settings from the training file: columns, step, and mean and scale of the training rows."""
        for key, names in (("inputs", forecast.inputs), ("targets", forecast.targets)):
            if names is not None and (not names or len(set(names)) < len(names)):
                problem = f"{json.dumps(names)[:80]} is not a list of columns"
                raise ConfigError(f"task.forecast.{key}", problem, "Name one or more, each once")
        file, columns = Path(self.config.source) / self.file, None
        if forecast.inputs is not None:
            columns = list(dict.fromkeys([*forecast.inputs, *(forecast.targets or [])]))
        rows = read_series(file, forecast.date, columns, None)
        inputs = forecast.inputs or rows.columns
        for column in forecast.targets or inputs:
            field(dict.fromkeys(rows.columns), column, SourceLocation(file, 1))
        self._begins("train", len(rows.dates), file)
        first, end = self.borders(len(rows.dates), file)["train"]
        from sklearn.preprocessing import StandardScaler  # mean and population standard deviation per column

        scaler = StandardScaler().fit(rows.values[first:end])
        settings: dict[str, Any] = {"inputs": inputs, "targets": forecast.targets or inputs}
        settings["step"] = (rows.dates[1] - rows.dates[0]).astype(timedelta).total_seconds()
        for name, values in (("mean", scaler.mean_), ("scale", scaler.scale_)):
            settings[name] = dict(zip(rows.columns, values.tolist(), strict=True))
        return forecast.model_copy(update=settings)


def read_series(file: Path, date: str, columns: list[str] | None, step: timedelta | None) -> SeriesRows:
    """Read all rows of a file.

    columns: None reads all except the date. step: required step between dates; None accepts any constant step. Raises
    DataError naming file and line.
    """
    lines: list[int] = []
    dates: list[datetime] = []
    values: list[list[float]] = []
    for location, row in strict(comma_separated(file)):
        try:
            at = datetime.fromisoformat(text := field(row, date, location).strip())
        except ValueError:
            raise DataError(str(location), f'"{text[:80]}" is not a date and time', DATE_HINT) from None
        if at.tzinfo is not None:  # days in a time zone vary in length
            raise DataError(str(location), f"{at} contains a time zone", "Convert all times to one zone, and omit it")
        if dates:
            difference = at - dates[-1]
            if difference <= timedelta(0):
                raise DataError(str(location), f"{at} follows {dates[-1]}, but is not later", HINT)
            if step is not None and difference != step:
                problem = f"{at} is {difference} after the previous row, but the step is {step}"
                raise DataError(str(location), problem, HINT)
            step = difference
        columns = columns or [name for name in row if name != date]
        lines.append(location.line or 0)
        dates.append(at)
        values.append([])
        for column in columns:
            if (value := parse_number((text := field(row, column, location)).strip())) is None:
                raise DataError(str(location), f'"{text[:80]}" in the column "{column}" is not a number', NUMBER_HINT)
            values[-1].append(value)
    if not values or not columns:
        raise DataError(file, f'no {"columns apart from" if values else "rows below"} "{date}"', "Add numbers by date")
    return SeriesRows(columns, lines, np.array(dates, dtype="datetime64[us]"), np.array(values))
