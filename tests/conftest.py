"""The order of the tests, and figures that the long tests report (`make soak` prints them)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.rows import RowRecorder, added_up

if not torch.cuda.is_available():  # before any kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

LONGEST = ("distributed", "reliability")
"""Folders whose tests start many processes."""
FIGURES = pytest.StashKey[list[dict[str, float]]]()

Report = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", type=Path, metavar="FILE", help="add the last run of each row of docs/reliability.md")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--rows")
    if file is not None and not hasattr(config, "workerinput"):  # pytest-xdist's workers report to this process
        config.pluginmanager.register(RowRecorder(file))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that no process is left alone with one at the end."""
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)


@pytest.fixture
def figures(request):
    """Call it with figures by their names: kills=20, bit_differences=0, longest_detection_seconds=1.2."""
    reported: dict[str, float] = {}
    request.node.user_properties.append(("figures", reported))
    yield lambda **values: reported.update(values)
    request.config.stash.setdefault(FIGURES, []).append(reported)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reported = added_up(config.stash.get(FIGURES, []))
    if reported:
        terminalreporter.section("figures")
    for name, value in sorted(reported.items()):
        terminalreporter.write_line(f"{name.replace('_', ' '):40} {value:,.6g}")
