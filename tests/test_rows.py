"""Every row of the table of promises has its test: a row's id stands in the name of each test that shows it."""

import ast
from pathlib import Path

from tests.conftest import SLOW

ROWS = [
    *(f"C{n}" for n in range(1, 12)),
    *("R1", "R2", "R3", "R4", "R6"),
    *(f"S{n}" for n in range(1, 9)),
    *(f"D{n}" for n in range(1, 11)),
    *(f"N{n}" for n in range(1, 8)),
    *("X1", "X3", "X4", "X5", "F1", "F2", "E1"),
]
"""Commit of checkpoints, exact resume, signals and death, data, numerics, security, configuration, endurance."""


def ids_in_names() -> set[str]:
    found = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found |= set(node.name.split("_"))
    return found


def test_every_row_has_a_test() -> None:
    missing = sorted(set(ROWS) - ids_in_names())
    assert not missing, f"no test is named test_ROW_... for {', '.join(missing)}"


def test_every_pattern_of_slow_files_names_some() -> None:
    tests = Path(__file__).parent
    unused = [pattern for pattern in SLOW if not any(tests.glob(f"**/{pattern}"))]
    assert not unused, f"tests/conftest.py: no file is named {', '.join(unused)}"
