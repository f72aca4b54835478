"""Curves, their axes and their numbers, and which curves share a chart."""

import re

import numpy as np
import pytest

from megasparse.report.chart import Line, Mark, chart, number_text
from megasparse.report.layout import plan
from megasparse.report.series import Series, smoothed


def test_points_lie_where_their_axes_say():
    series = Series(np.array([0, 10, 20]), np.array([1.0, np.nan, 3.0]))
    found = chart("T", "u", [Line("a", series)], [Mark(10, "spike", "x"), Mark(99, "spike", "outside")])
    low, high, log = (float(x) for x in re.search(r'data-y="([^"]*)"', found)[1].split(","))  # type: ignore[index]
    assert log == 0 and low <= 1.0 and high >= 3.0
    dots = re.findall(r"M([\d.]+) ([\d.]+)h0", found)
    assert [float(x) for x, _ in dots] == [58, 550], "with a gap between them"
    for (_, y), value in zip(dots, (1.0, 3.0), strict=True):
        assert float(y) == pytest.approx(204 + (value - low) / (high - low) * (8 - 204), abs=0.06)
    assert found.count('class="m spike"') == 1 and 'd="M304 8V204"' in found
    assert chart("T", "u", [Line("a", Series(np.array([1]), np.array([np.nan])))]) == ""


def test_a_wide_range_of_positive_values_is_logarithmic():
    steps = np.arange(4)
    found = chart("T", "u", [Line("a", Series(steps, np.array([1.0, 10.0, 100.0, 1000.0])))])
    assert "u, logarithmic" in found
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)(?=[L\"])", found)]
    assert np.diff(heights) == pytest.approx([-196 / 3] * 3, abs=0.11)
    for values in ([0.0, 10.0, 100.0, 1000.0], [-1.0, 1.0, 5.0, 500.0]):
        assert "logarithmic" not in chart("T", "u", [Line("a", Series(steps, np.array(values)))])


def test_running_means_leave_out_what_is_not_finite():
    values = np.array([1.0, np.nan, 3.0, 5.0, np.nan, np.nan, np.nan])
    found = smoothed(Series(np.arange(7), values), 3).values
    assert found[:5] == pytest.approx([1.0, 2.0, 4.0, 4.0, 5.0]) and np.isnan(found[5:]).all()


def test_every_scalar_is_in_one_chart_at_least():
    names = {"train/loss", "evaluation/loss", "model/objective", "quality/lsh/x", "quality/y"}
    names |= {"a", "b/c", "b/c/layer_3"}
    planned = plan(names, finetuning=False)
    assert {name for charts in planned.values() for each in charts for name in each.names} == names
    assert [each.title for each in planned["Others"]] == ["a", "b/c", "quality/y"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.0, "0"), (0.00012, "0.00012"), (9999.0, "9999"), (12_345.0, "12.35k"), (5e9, "5G"), (-2e6, "-2M")),
        (np.inf, "not finite"),
    ],
)
def test_numbers_are_short(value, text):
    assert number_text(value) == text
