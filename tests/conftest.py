"""The collection and order of the tests, the interpreter of kernels, and figures of the long tests (`make soak`)."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # before any kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):  # which is not on every system
    from triton import language
    from triton.runtime import interpreter

    patch, execute, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()
    find_dtype, dtypes = interpreter._get_np_dtype, {}

    def launch(*args, **kwargs):
        patched.clear()
        return execute(*args, **kwargs)

    def patch_once(function):
        """Patch each module of the language once per launch, not in every call of a function: a third of the time."""
        modules = {x.__name__ for x in function.__globals__.values() if x is language or x is language.core}
        if not modules <= patched:
            patched.update(modules)
            return patch(function)

    def numpy_dtype(kind):
        """Find each dtype once, not in a new table in every operation."""
        if kind.name not in dtypes:
            dtypes[kind.name] = find_dtype(kind)
        return dtypes[kind.name]

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch
    interpreter._get_np_dtype = numpy_dtype

LONGEST = ("distributed", "reliability", "stopping", "planning", "runs", "tests", "tools")
"""Folders of the longest files."""
LARGEST = ("seconds", "ratio", "slope")
"""Endings of the names of figures whose maximum is printed; the others are added up."""
MARKERS = {"claims", "cluster", "kernels", "soak"}
"""Markers of a few files, which `-m MARKER` selects."""
FIGURES = pytest.StashKey[list[dict[str, float]]]()

Report = Callable[..., None]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files that do not contain the marker of `-m MARKER`: importing all takes longer than many tests."""
    marker = config.option.markexpr
    if marker not in MARKERS or collection_path.suffix != ".py":
        return None
    return marker not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, so that no process is left with one at the end."""
    for item in items:
        for marker in MARKERS & {mark.name for mark in item.iter_markers()}:
            if marker not in item.path.read_text(encoding="utf-8"):
                raise pytest.UsageError(f"{item.nodeid}: -m {marker} skips its file, which does not contain {marker}")
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)


@pytest.fixture
def threads(request):
    """Threads of torch, a parameter: libraries may sum in another order with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def figures(request):
    """Call it with figures by their names: kills=20, bit_differences=0, longest_detection_seconds=1.2."""
    reported: dict[str, float] = {}
    request.node.user_properties.append(("figures", reported))
    yield lambda **values: reported.update(values)
    request.config.stash.setdefault(FIGURES, []).append(reported)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    total: dict[str, float] = {}
    for reported in config.stash.get(FIGURES, []):
        for name, value in reported.items():
            total[name] = max(total.get(name, value), value) if name.endswith(LARGEST) else total.get(name, 0) + value
    if total:
        terminalreporter.section("figures")
    for name, value in sorted(total.items()):
        terminalreporter.write_line(f"{name.replace('_', ' '):40} {value:,.6g}")
