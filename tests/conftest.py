"""Figures that the long tests report; `make soak` prints them together at its end."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

if not torch.cuda.is_available():  # before any kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

FIGURES = pytest.StashKey[dict[str, float]]()
LARGEST = ("seconds", "ratio", "slope")
"""Endings of names of which the largest counts; the others are added up."""

Report = Callable[..., None]


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[Report]:
    """Call it with figures by their names: kills=20, bit_differences=0, longest_detection_seconds=1.2."""
    reported: dict[str, float] = {}
    yield lambda **values: reported.update(values)
    total = request.config.stash.setdefault(FIGURES, {})
    for name, value in reported.items():
        largest = name.endswith(LARGEST)
        total[name] = max(total.get(name, value), value) if largest else total.get(name, 0) + value


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reported = config.stash.get(FIGURES, {})
    if reported:
        terminalreporter.section("figures")
    for name, value in sorted(reported.items()):
        terminalreporter.write_line(f"{name.replace('_', ' '):40} {value:,.6g}")
