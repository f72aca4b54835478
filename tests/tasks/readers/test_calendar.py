"""Dates of rows, and their time features."""

from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from megasparse.errors import DataError
from megasparse.tasks.readers.series import parse_date, require_step, time_features
from megasparse.tasks.task import SourceLocation

PLACE = SourceLocation(Path("a.csv"), 7)


@pytest.mark.parametrize("minutes", [15, 60, 24 * 60, 7 * 60 + 13])
def test_features_are_those_of_datetime(minutes):
    """Over leap years, ends of years, and before 1970."""
    for start in (datetime(2016, 2, 27, 21, 30), datetime(1968, 12, 30, 3), datetime(2023, 12, 31, 23, 45)):
        dates = [start + i * timedelta(minutes=minutes) for i in range(400)]
        found = time_features(np.array(dates, dtype="datetime64[us]"), minutes * 60.0)
        wanted = [
            [one.hour / 23, one.weekday() / 6, (one.day - 1) / 30, (one.timetuple().tm_yday - 1) / 365] for one in dates
        ]
        if minutes % 60:
            wanted = [[one.minute / 59, *row] for one, row in zip(dates, wanted, strict=True)]
        np.testing.assert_allclose(found, np.array(wanted) - 0.5, rtol=0, atol=1e-15)
        assert np.abs(found).max() <= 0.5


@pytest.mark.parametrize("text", ["", "yesterday", "2016-02-30 00:00:00", "1/7/2016 13:00", "nan"])
def test_what_is_no_date_is_refused(text):
    with pytest.raises(DataError, match=rf'a\.csv:7: "{text}" is no date and time. Write it as 2016-07-01 13:00:00'):
        parse_date(text, PLACE)


def test_steps_are_equal_and_forward():
    first, hour = datetime(2020, 1, 1), timedelta(hours=1)
    assert require_step(first, first + hour, None, PLACE) == require_step(first, first + hour, hour, PLACE) == hour
    for later in (first, first - hour):
        with pytest.raises(DataError, match=r"a\.csv:7: .* comes after 2020-01-01 00:00:00, which is no earlier. Put"):
            require_step(first, later, hour, PLACE)
    with pytest.raises(DataError, match=r"a\.csv:7: .* is 2:00:00 after the row before it, where a step is 1:00:00"):
        require_step(first, first + 2 * hour, hour, PLACE)
