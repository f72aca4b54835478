"""Every row of the table of promises has its test: a row's id stands in the name of each test that shows it."""

import ast
import json
from datetime import date
from pathlib import Path

import pytest

from tests.helpers.rows import DOCUMENT, RECORD, ROWS, RowRecorder, table


def ids_in_names() -> set[str]:
    found = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found |= set(node.name.split("_"))
    return found


def test_every_row_has_a_test():
    found = ids_in_names()
    missing = [f"{row} ({what})" for row, what in ROWS.items() if row not in found]
    assert not missing, f"no test is named test_ROW_... for {', '.join(missing)}"


def test_the_table_of_the_last_runs_is_that_of_the_record():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert table(json.loads(RECORD.read_text())) in text, "python -m tests.helpers.rows writes it anew"


def test_a_row_shows_its_last_run_and_the_figures_that_fit():
    figures = {"test_C1": {"kills": 20, "longest_seconds": 1.25}, "test_C1_C9": {"kills": 22, "longest_seconds": 3.5}}
    long = {f"test_{n}": {f"a_figure_with_a_name_that_takes_room_{n}": 1} for n in range(4)}
    recorded = {
        "C1": {"date": "2030-01-02", "passed": 2, "failed": 0, "figures": figures},
        "C2": {"date": "2030-01-02", "passed": 1, "failed": 3, "figures": long},
    }
    shown = table(recorded).splitlines()
    assert f"| C1 | {ROWS['C1']} | 2030-01-02 | 2 | kills 42, longest seconds 3.5 |" in shown
    assert "| C3 | a rank that writes late, and dies | | | |" in shown
    assert any(line.startswith(f"| C2 | {ROWS['C2']} | 2030-01-02 | 1, 3 failed | a figure") for line in shown)
    assert max(map(len, shown)) <= 120


def test_the_last_run_is_recorded_and_others_are_kept(tmp_path):
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"N1": {"date": "2030-01-02", "passed": 1, "failed": 0, "figures": {}}}))
    recorder = RowRecorder(record)
    for name, outcome, figures in (
        ("test_C10_C2_both[a_C3]", "passed", {"kills": 3}),
        ("test_C2_alone", "failed", {}),
        ("test_other", "passed", {}),
        ("test_C2_skipped", "skipped", {}),
    ):
        for when in ("setup", "call", "teardown"):
            result = outcome if when == "call" else "passed"
            properties = [("figures", figures)]
            report = pytest.TestReport(f"a.py::{name}", ("a.py", 1, name), {}, result, None, when, (), 0.0, properties)
            report.user_properties = properties
            recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish()
    found = json.loads(record.read_text())
    assert list(found) == ["C2", "C10", "N1"] and found["N1"]["date"] == "2030-01-02"
    assert (found["C2"]["passed"], found["C2"]["failed"], found["C10"]["passed"]) == (1, 1, 1)
    assert found["C10"]["figures"] == {"test_C10_C2_both[a_C3]": {"kills": 3}}
    assert found["C2"]["date"] == date.today().isoformat()
