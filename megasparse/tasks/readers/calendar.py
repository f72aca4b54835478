"""Dates of a series' rows, one each step, and the time features that a model reads. N rows."""

from datetime import datetime, timedelta

import numpy as np

from megasparse.errors import DataError
from megasparse.tasks.task import SourceLocation

HOUR, DAY = 3600.0, 86400.0
"""Seconds."""
HINT = "Put the rows in order of time, one each step, and fill the gaps"


def date(text: str, location: SourceLocation) -> datetime:
    """Parse a date and time. Raises DataError for anything else, and for a time zone, whose days vary in length."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        problem = f'"{text[:80]}" is no date and time'
        raise DataError(str(location), problem, "Write it as 2016-07-01 13:00:00") from None
    if found.tzinfo is not None:
        raise DataError(
            str(location), f'"{text[:80]}" names a time zone', "Give all times in one zone, without its name"
        )
    return found


def require_step(earlier: datetime, later: datetime, step: timedelta | None, location: SourceLocation) -> timedelta:
    """The step from a row to the next. Raises DataError where it is not `step`, unless that is None (not yet known)."""
    own = later - earlier
    if own <= timedelta(0):
        raise DataError(str(location), f"{later} comes after {earlier}, which is no earlier", HINT)
    if step is not None and own != step:
        raise DataError(str(location), f"{later} is {own} after the row before it, where a step is {step}", HINT)
    return own


def features(dates: np.ndarray, step: float) -> np.ndarray:
    """Informer's time features (Zhou et al. 2020), float64 (N, 4), each from −1/2 to 1/2: hour of the day/23, day of
    the week/6 (from Monday), day of the month/30 and day of the year/365 (both counted from 0), less 1/2 each. Where
    the step is no whole number of hours, the minute of the hour/59 comes first, (N, 5).

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


def season(step: float) -> int | None:
    """Number of rows a day; None where a day is not two or more whole steps."""
    return round(DAY / step) if step <= DAY / 2 and DAY % step == 0 else None
