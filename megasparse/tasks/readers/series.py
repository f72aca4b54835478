"""Forecasts of time series (ETT, Electricity and others), and the features of their dates."""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from megasparse.config.finetuning import ForecastConfig, TaskConfig
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.readers.rows import dated_rows, field
from megasparse.tasks.task import PARTS, Example, SourceLocation, Task, parts_of, split_name


def time_features(dates: np.ndarray, step: float) -> np.ndarray:
    """Compute Informer's time features (Zhou et al. 2020) of dates (N,), float64 (N, 4), each from −1/2 to 1/2: hour of
    the day, day of the week, of the month and of the year. If the step, in seconds, is not a whole number of hours, the
    minute of the hour precedes them, (N, 5).
    """
    import pandas

    date = pandas.DatetimeIndex(dates)
    parts = [date.hour / 23, date.dayofweek / 6, (date.day - 1) / 30, (date.dayofyear - 1) / 365]
    return np.stack([date.minute / 59, *parts] if step % 3600 else parts, axis=1) - 0.5


OFFICIAL = {"etth1": ("ETTh1.csv", 24 * 30), "ettm1": ("ETTm1.csv", 24 * 30 * 4)}
"""Files of the electricity transformer temperature (Zhou et al. 2020), and rows of a month of 30 days."""


class Series(Task):
    """Any CSV file with a column of dates at equal steps, and columns of numbers.

    FILE#train, FILE#validation and FILE#test are 70, 10 and 20 % of its rows, as in Informer's Dataset_Custom; of an
    official file 12, 4 and 4 months. A window predicts only rows of its part, but may read earlier rows. FILE is one
    example without a label: its last L rows.

    The inputs of an example are scaled values (L, C), columns of `forecast.inputs` first, and the time features of all
    rows (L + H, F). The label is the scaled targets (H, T), the name the date of the first predicted row.
    """

    name, form, metrics = "series", "forecast", ("mse", "mae")

    def __init__(self, config: TaskConfig):
        super().__init__(config)
        forecast, (self.file, self.month) = config.forecast, OFFICIAL.get(config.name, ("", 0))
        self.source_is_file, self.name = not self.file, config.name if self.file else "series"
        if None in (forecast.inputs, forecast.targets, forecast.mean, forecast.scale, forecast.step):
            forecast = self._fitted(forecast)
            self.config = config.changed(forecast=forecast)
        self.inputs, self.targets = forecast.inputs or [], forecast.targets or []
        self.columns = list(dict.fromkeys([*self.inputs, *self.targets]))
        self.target_places = [self.columns.index(column) for column in self.targets]
        mean, scale, self.step = forecast.mean or {}, forecast.scale or {}, timedelta(seconds=forecast.step or 0)
        if lost := [column for column in self.columns if column not in mean or column not in scale]:
            raise ConfigError("task.forecast.mean", f'or scale lacks the column "{lost[0]}"', "Set both to null")
        self.mean, self.scale = (np.array([of[column] for column in self.columns]) for of in (mean, scale))
        self.time_features = 4 + bool(self.step.total_seconds() % 3600)

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return parts_of([folder / self.file])

    def read(self, file: Path) -> Iterator[Example]:
        file, part = split_name(file)
        length, horizon = self.config.max_length, self.config.forecast.horizon
        _, lines, dates, values = dated_rows(file, self.config.forecast.date, self.columns, self.step)
        if part is None and len(dates) < length:
            raise DataError(file, f"contains {len(dates)} rows, but a forecast reads {length}", "Add earlier rows")
        values = (values - self.mean) / self.scale
        dates = np.concatenate([dates, dates[-1] + np.timedelta64(self.step) * np.arange(1, horizon + 1)])
        marks = time_features(dates, self.step.total_seconds())
        for first in [len(lines) - length] if part is None else self.windows(part, len(lines), file):
            now = first + length
            label = None if part is None else values[now : now + horizon, self.target_places]
            inputs: Any = (values[first:now], marks[first : now + horizon])
            yield Example(inputs, label, SourceLocation(file, lines[now - 1]), str(dates[now].astype(datetime)))

    def windows(self, part: str, rows: int, file: Path) -> range:
        """Return the first rows of a part's windows, one for every row. Raises DataError for a file too short."""
        length, horizon, month = self.config.max_length, self.config.forecast.horizon, self.month
        if rows < 20 * month:
            raise DataError(file, f"contains {rows:,} rows, the official one {20 * month:,}", 'Set task.name="series"')
        official, custom = (0, 12 * month, 16 * month, 20 * month), (0, int(rows * 0.7), rows - int(rows * 0.2), rows)
        first, end = (official if month else custom)[PARTS.index(part) :][:2]
        begins = range(max(0, first - length), end - length - horizon + 1)
        if not begins:
            problem = f"{end - first} rows of the {part} split are too few to read {length} and predict {horizon}"
            raise DataError(file, problem, "Use a longer file, or lower task.max_length or task.forecast.horizon")
        return begins

    def _fitted(self, forecast: ForecastConfig) -> ForecastConfig:
        for key in ("inputs", "targets"):
            if (names := getattr(forecast, key)) is not None and len(set(names)) < max(1, len(names)):
                problem = f"{json.dumps(names)[:80]} is not a list of columns"
                raise ConfigError(f"task.forecast.{key}", problem, "Name one or more, each once")
        file = Path(self.config.source) / self.file
        chosen = forecast.inputs and list(dict.fromkeys([*forecast.inputs, *(forecast.targets or [])]))
        columns, _, dates, values = dated_rows(file, forecast.date, chosen, None)
        targets = forecast.targets or forecast.inputs or columns
        for column in targets:
            field(dict.fromkeys(columns), column, SourceLocation(file, 1))
        end = self.windows("train", len(dates), file).stop - 1 + self.config.max_length + forecast.horizon
        from sklearn.preprocessing import StandardScaler  # mean and population standard deviation per column

        scaler = StandardScaler().fit(values[:end])
        mean, scale = (dict(zip(columns, part.tolist(), strict=True)) for part in (scaler.mean_, scaler.scale_))
        step = (dates[1] - dates[0]).astype(timedelta).total_seconds()
        inputs = forecast.inputs or columns
        return forecast.changed(inputs=inputs, targets=targets, step=step, mean=mean, scale=scale)
