"""Which tests `make test-fast` leaves out, and figures that the long tests report (`make soak` prints them)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.rows import RowRecorder, added_up

if not torch.cuda.is_available():  # before any kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

SLOW = (
    *("distributed/*", "reliability/*", "benchmarks/*", "cli/*", "stopping/*", "hub/*", "forms/*", "ops/*", "claims/*"),
    *("runs/*", "planning/*", "evaluation/attention/*"),
    *("*launcher*.py", "*_memory.py", "*_fuzz*.py", "test_remote*.py", "test_workers.py", "test_damage.py"),
    *("test_decoding.py", "test_implementations.py", "model/test_duplication.py", "test_extremes.py", "test_draws.py"),
    *("test_jsonl.py", "test_captured.py", "test_compiled.py", "test_padding.py", "test_autocast.py", "test_band.py"),
    *("test_compress.py", "test_memory_check.py", "tasks/test_restore.py", "test_entropy_coder.py", "test_papers.py"),
    *("tasks/test_run.py", "test_asynchronous_saving.py", "test_exact_resume.py", "test_scalars.py", "test_tracing.py"),
    *("test_frozen.py", "test_ranks.py", "test_api.py", "test_lha.py", "test_wikihop.py", "test_full_disk.py"),
    *("test_corruption.py", "test_memory_shortage.py", "test_notebook.py", "test_drawn.py", "test_head_groups.py"),
    *("training/test_loop.py", "test_encoder_decoder.py", "test_download.py", "test_run_lock.py", "test_index.py"),
    *("data/test_prepare.py", "data/test_batches.py", "data/test_reader.py", "test_plain.py", "test_bert_style.py"),
    *("test_deferred.py", "test_text_metrics.py", "test_reversible.py", "test_page.py", "tasks/test_start.py"),
    *("test_intervals.py", "test_sinks.py", "test_probability_dropout.py"),
)
"""Patterns of files that `make test-fast` leaves out: over 4 seconds on a quiet core, or in folders of such files."""

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


def pytest_itemcollected(item: pytest.Item) -> None:
    path = item.path.relative_to(Path(__file__).parent)
    if any(path.match(pattern) for pattern in SLOW):
        item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that no process is left alone with one at the end."""
    items.sort(key=lambda item: (item.path.parent.name not in LONGEST, item.get_closest_marker("slow") is None))


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
