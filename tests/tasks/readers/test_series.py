"""Windows of tables by date, against readings of the same file by hand."""

import csv
import json
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from sklearn.preprocessing import StandardScaler

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import DataError
from megasparse.tasks.catalog import build_task
from megasparse.tasks.readers.series import Series, time_features
from megasparse.tasks.task import Example, split_files
from tests.helpers.finetuning import COLUMNS, HOUR, START, numbers, series, write

ROWS = 100
"""70 to train on, 10 to validate, 20 to test."""
L, H = 12, 4


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "series.csv", numbers(ROWS))


def by_hand(file: Path) -> tuple[list[datetime], np.ndarray]:
    with open(file, newline="") as stream:
        rows = list(csv.DictReader(stream))
    values = np.array([[float(row[column]) for column in COLUMNS] for row in rows])
    return [datetime.strptime(row["date"], "%Y-%m-%d %H:%M:%S") for row in rows], values


def part(task: Series, file: Path, split: str) -> list[Example]:
    (one,) = split_files(task, file, split)
    return list(task.read(one))


@pytest.mark.parametrize(
    ("split", "predicted"),
    [("train", range(L, 70 - H + 1)), ("validation", range(70, 80 - H + 1)), ("test", range(80, 100 - H + 1))],
)
def test_windows_of_a_split(file, split, predicted):
    """Windows start at the expected rows; predicted: the first predicted row of each window."""
    task = series(file)
    dates, values = by_hand(file)
    scaled = StandardScaler().fit(values[:70]).transform(values)
    result = part(task, file, split)
    assert len(result) == len(predicted)
    for example, now in zip(result, predicted, strict=True):
        read, marks = example.inputs
        np.testing.assert_allclose(read, scaled[now - L : now], rtol=1e-12)
        np.testing.assert_allclose(example.label, scaled[now : now + H], rtol=1e-12)
        wanted = time_features(np.array(dates[now - L : now + H], dtype="datetime64[us]"), 3600.0)
        np.testing.assert_array_equal(marks, wanted)
        assert example.name == str(dates[now])
        assert str(example.location) == f"{file}:{now + 1}"  # of the last row read, under the line of names


def test_columns_by_name(file):
    task = series(file, inputs=["wind", "load"], targets=["OT", "wind"])
    assert task.columns == ["wind", "load", "OT"]
    scaled = StandardScaler().fit(by_hand(file)[1][:70]).transform(by_hand(file)[1])
    first = part(task, file, "train")[0]
    np.testing.assert_allclose(first.inputs[0], scaled[:L][:, [1, 0, 2]], rtol=1e-12)
    np.testing.assert_allclose(first.label, scaled[L : L + H][:, [2, 1]], rtol=1e-12)
    assert series(file).config.forecast.targets == list(COLUMNS)


def test_a_resolved_task_needs_no_training_file(file, tmp_path):
    kept = json.loads(series(file).config.model_dump_json())
    before = part(series(file), file, "test")
    new = write(tmp_path / "new.csv", by_hand(file)[1][60:97].tolist(), START + 60 * HOUR)
    file.unlink()
    task = build_task(TaskConfig(**{**kept, "name": "series"}))
    (result,) = task.read(new)
    assert result.label is None and str(result.location) == f"{new}:38" and result.name == str(START + 97 * HOUR)
    wanted = next(each for each in before if each.name == str(START + 96 * HOUR)).inputs
    np.testing.assert_array_equal(result.inputs[0][:-1], wanted[0][1:])  # one row later
    np.testing.assert_array_equal(result.inputs[1][:-1], wanted[1][1:])
    later = time_features(np.array([START + (97 + H - 1) * HOUR], dtype="datetime64[us]"), 3600.0)
    np.testing.assert_array_equal(result.inputs[1][-1:], later)


@pytest.fixture(scope="module")
def etth1(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ett")
    with open(folder / "ETTh1.csv", "w") as out:
        out.write("date,HUFL,OT\n")
        for i in range(17420):
            out.write(f"{datetime(2016, 7, 1) + i * HOUR},{i},{-i}\n")
    return folder


@pytest.mark.parametrize(("horizon", "counts"), [(24, (8521, 2857, 2857)), (168, (8377, 2713, 2713))])
def test_official_splits_of_etth1(etth1, horizon, counts):
    """12, 4 and 4 months of 30 days; Informer's counts of windows that read 96 rows."""
    settings = {"name": "etth1", "source": str(etth1), "max_length": 96, "forecast": {"horizon": horizon}}
    task = build_task(TaskConfig.model_validate(settings))
    assert isinstance(task, Series)
    mean, scale = task.mean[0], task.scale[0]
    assert mean == pytest.approx(8639 / 2) and scale == pytest.approx(((8640**2 - 1) / 12) ** 0.5)
    for split, count, first in zip(("train", "validation", "test"), counts, (96, 8640, 11520), strict=True):
        result = part(task, etth1, split)
        rows = [round(float(example.label[0, 0] * scale + mean)) for example in result]
        assert rows == list(range(first, first + count))
        last = float(result[-1].label[-1, 0] * scale + mean)
        assert round(last) == {"train": 8639, "validation": 11519, "test": 14399}[split]


@pytest.mark.parametrize(
    ("line", "text", "said"),
    [
        (1, "time,load,wind,OT", r'series\.csv:2: missing column "date"'),
        (5, "2019-12-30 08:00:00,1,2,", r'csv:5: "" in the column "OT" is not a number. Write one, such as 3.5'),
        (5, "2019-12-30 08:00:00,1,nan,3", r'series\.csv:5: "nan" in the column "wind" is not a number'),
        (5, "2019-12-30 08:00:00,x,2,3", r'series\.csv:5: "x" in the column "load" is not a number'),
        (5, "2019-12-30 08:00:00,1,2", r"series\.csv:5: 3 fields instead of 4"),
        (5, "now,1,2,3", r'series\.csv:5: "now" is not a date and time'),
        (5, "2019-12-30 09:00:00,1,2,3", r"series\.csv:5: .* is 2:00:00 after the previous row"),
        (5, "2019-12-30 06:00:00,1,2,3", r"series\.csv:5: .* follows 2019-12-30 07:00:00, but is not later"),
        (None, "date,load,wind,OT\n", r"series\.csv: no rows below"),
        (None, "", r"series\.csv: is empty"),
        (None, "date\n2020-01-01\n2020-01-02\n", r'series\.csv: no columns apart from "date"'),
    ],
)
def test_a_bad_line_is_named(file, line, text, said):
    if line is None:
        file.write_text(text)
    else:
        lines = file.read_text().splitlines()
        file.write_text("\n".join([*lines[: line - 1], text, *lines[line:]]) + "\n")
    with pytest.raises(DataError, match=said):
        series(file)


def test_too_few_rows_are_rejected(tmp_path):
    file = write(tmp_path / "short.csv", numbers(20))
    with pytest.raises(DataError, match=r"short\.csv: 20 rows leave 14 for the train split, too few .* 12 rows .* 4"):
        series(file)
    file = write(tmp_path / "short.csv", numbers(30))  # 21, 3 and 6
    with pytest.raises(DataError, match=r"short\.csv: 30 rows leave 3 for the validation split"):
        part(series(file), file, "validation")
    new = write(tmp_path / "new.csv", numbers(11))
    with pytest.raises(DataError, match=r"new\.csv: contains 11 rows, but a forecast reads 12 \(task.max_length\)"):
        list(series(file).read(new))


@pytest.mark.parametrize("minutes", [15, 60, 24 * 60, 7 * 60 + 13])
def test_features_equal_datetime(minutes):
    for start in (datetime(2016, 2, 27, 21, 30), datetime(1968, 12, 30, 3), datetime(2023, 12, 31, 23, 45)):
        dates = [start + i * timedelta(minutes=minutes) for i in range(400)]
        result = time_features(np.array(dates, dtype="datetime64[us]"), minutes * 60.0)
        wanted = []
        for one in dates:
            day = [one.hour / 23, one.weekday() / 6, (one.day - 1) / 30, (one.timetuple().tm_yday - 1) / 365]
            wanted.append([one.minute / 59, *day] if minutes % 60 else day)
        np.testing.assert_allclose(result, np.array(wanted) - 0.5, rtol=0, atol=1e-15)
        assert np.abs(result).max() <= 0.5
