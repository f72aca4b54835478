"""MIND's impressions, in small folders of their form."""

from typing import Any

import pytest

from megasparse.config.finetuning import RecommendationConfig, TaskConfig
from megasparse.errors import DataError
from megasparse.tasks import build_task
from megasparse.tasks.task import Task
from tests.helpers.mind import behaviors_row, news_row, split_folder

NEWS = [
    news_row("N1", 'The "Brands" they Swear By'),
    news_row("N2", "Cold \u2028 soup"),
    news_row("N3", "Rain"),
    news_row("N4", "Rain"),
]


def task(history: int = 50, **changes: Any) -> Task:
    return build_task(TaskConfig(name="mind", recommendation=RecommendationConfig(history=history), **changes))


def test_an_impression_is_the_titles_of_clicked_and_of_shown_news(tmp_path):
    rows = [
        behaviors_row("17", "N1 N3", "N2-1 N1-0 N3-0"),
        behaviors_row("9", "", "N3-0 N4-1"),
        behaviors_row("9", "N2", "N3 N2"),
    ]
    file = split_folder(tmp_path / "dev", NEWS, rows)
    first, second, third = task().read(file)
    brands, soup = 'The "Brands" they Swear By', "Cold \u2028 soup"
    assert first.inputs == ((brands, "Rain"), (soup, brands, "Rain")) and first.label == (1, 0, 0)
    assert first.name == "17" and str(first.location) == f"{file}:1"
    assert second.inputs == ((), ("Rain", "Rain")) and second.label == (0, 1)
    assert third.inputs == ((soup,), ("Rain", soup)) and third.label is None


@pytest.mark.parametrize(
    "row, problem",
    [
        (behaviors_row("2", "N1 N9", "N1-0 N2-1"), r'"N9" is no news of .*news\.tsv'),
        (behaviors_row("2", "N1", "N1-0 N7-1"), r'"N7" is no news of .*news\.tsv'),
        (behaviors_row("2", "N1", "N1 N7"), r'"N7" is no news of .*news\.tsv'),
        (behaviors_row("2", "N1", "N1-0 N2-2"), '"N2-2" has no label 0 or 1'),
        (behaviors_row("2", "N1", "N1-0 N2-"), '"N2-" has no label 0 or 1'),
        (behaviors_row("2", "N1", "N1-0 N2"), '"N2" has no label 0 or 1'),
        (behaviors_row("2", "N1", "N1-0 -1"), '"-1" has no label 0 or 1'),
        (behaviors_row("2", "N1", " "), "an impression without any news"),
        (behaviors_row("2", "N1", "N1-0 N2-0"), "no click on any news shown"),
        (behaviors_row("2", "N1", "N1-1"), "a click on every news shown"),
        ("2\tU1\tnow\tN1\n", r"4 fields where there are 5 columns \(impression id, user id"),
        ("2\tU1\tnow\tN1\tN1-0 N2-1\t\n", "6 fields where there are 5 columns"),
    ],
)
def test_a_bad_impression_is_named_by_file_and_line(tmp_path, row, problem):
    file = split_folder(tmp_path, NEWS, [behaviors_row("1", "N1", "N1-0 N2-1"), row])
    with pytest.raises(DataError, match=f"{file}:2: {problem}"):
        list(task().read(file))


@pytest.mark.parametrize(
    "row, problem",
    [
        (news_row("N5", ""), 'the title of "N5" is empty'),
        (news_row("N5", "  "), 'the title of "N5" is empty'),
        (news_row("N1", "again"), '"N1" stands there twice'),
        ("N5\tnews\ta title\n", "3 fields where there are 8 columns"),
    ],
)
def test_a_bad_news_is_named_by_file_and_line(tmp_path, row, problem):
    file = split_folder(tmp_path, [*NEWS, row], [behaviors_row("1", "N1", "N1-0 N2-1")])
    with pytest.raises(DataError, match=rf"{tmp_path}/news\.tsv:5: {problem}"):
        list(task().read(file))
