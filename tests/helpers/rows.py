"""The rows of docs/reliability.md, and the last run of each, which pytest's option --rows records.

python -m pytest --rows docs/measured/reliability.json tests/training tests/reliability
python -m tests.helpers.rows                       # writes the table of docs/reliability.md anew
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

ROWS = {
    "C1": "the whole job killed at random moments",
    "C2": "a rank killed at each point of a save",
    "C3": "a rank that writes late, and dies",
    "C4": "one rank's write fails",
    "C5": "a full disk, a quota, a vanished or read-only folder",
    "C6": "checkpoint files damaged, cut, gone, swapped, added",
    "C7": "entries beside checkpoints that are none, and a wrong `latest`",
    "C8": "a save while another is under way",
    "C9": "a complete checkpoint exists at all times",
    "C10": "ranks that save different steps",
    "C11": "another configuration, data or tokenizer",
    "C12": "a second run in the same folder",
    "C13": "metrics and checkpoints that contradict each other",
    "C14": "checkpoints in a bucket",
    "R1": "a stop after any step",
    "R2": "an exact resume with every attention",
    "R3": "a resume on another number of ranks",
    "R4": "another read-ahead",
    "R6": "a resume late in a large epoch",
    "R7": "ranks that do not come back",
    "S1": "SIGTERM, SIGINT, SIGUSR1",
    "S2": "a rank killed",
    "S3": "a rank that hangs",
    "S4": "the reading thread fails",
    "S5": "a rank that raises",
    "S6": "a slow rank",
    "S7": "the same crash again and again",
    "S8": "a port that is taken",
    "D1": "shards of another size",
    "D2": "hostile members of shards",
    "D3": "damaged members",
    "D4": "a hostile index",
    "D5": "members that would be written elsewhere",
    "D6": "storage that does not answer",
    "D7": "slow storage",
    "D8": "each sequence once an epoch",
    "D9": "bytes that come back unchanged",
    "D10": "any bytes in place of an index",
    "N1": "losses and gradients that are not finite",
    "N2": "weights that are not finite are not saved",
    "N3": "spikes of the loss",
    "N4": "extreme values in every mechanism",
    "N5": "operators equal their definitions",
    "N6": "the same seed gives the same bits",
    "N7": "outputs of a prefix do not depend on what follows",
    "N8": "silent corruption",
    "N9": "memory that does not suffice",
    "X1": "checkpoints that carry code",
    "X3": "configurations that carry code",
    "X4": "what our own source may not call",
    "X5": "modes of files, and planted links",
    "X6": "forged sizes",
    "X7": "mutants of every kind of file",
    "F1": "mutated configurations",
    "F2": "ranks started with different configurations",
    "E1": "a long run under random faults",
}
"""Id of each row of docs/reliability.md -> the fault that it injects, or what it promises. C is for checkpoints, R for
resuming, S for signals and dying ranks, D for data, N for numbers, X for security, F for fuzzing, E for endurance."""

ROW = re.compile(r"[CRSDNXFE]\d+")
LARGEST = ("seconds", "ratio", "slope")
"""Endings of names of figures of which the largest counts; the others are added up."""
DOCS = Path(__file__).resolve().parents[2] / "docs"
RECORD, DOCUMENT = DOCS / "measured" / "reliability.json", DOCS / "reliability.md"
HEAD = "| row | what | last run | tests | figures |\n|---|---|---|---|---|\n"
WIDTH = 120


def rows_of(test: str) -> list[str]:
    """The ids of rows in a test's name, such as C1 and C9 in test_C1_C9_a_job_is_killed[two ranks]."""
    return [word for word in test.partition("[")[0].split("_") if ROW.fullmatch(word)]


class RowRecorder:
    """A plugin of pytest that adds what ran to a JSON file: row -> date, tests passed and failed, figures by test."""

    def __init__(self, file: Path):
        self.file = file
        self.found: dict[str, dict[str, Any]] = defaultdict(lambda: {"passed": 0, "failed": 0, "figures": {}})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (report.passed and report.when != "call"):
            return
        name = report.nodeid.rpartition("::")[2]
        for row in rows_of(name):
            self.found[row]["passed" if report.passed else "failed"] += 1
            for key, value in report.user_properties:
                if key == "figures" and value:
                    self.found[row]["figures"][name] = value

    def pytest_sessionfinish(self) -> None:
        recorded = json.loads(self.file.read_text()) if self.file.exists() else {}
        for row, found in self.found.items():
            recorded[row] = {"date": date.today().isoformat(), **found}
        ordered = dict(sorted(recorded.items(), key=lambda row: (row[0][0], int(row[0][1:]))))
        self.file.write_text(json.dumps(ordered, indent=1) + "\n")


def added_up(figures: Iterable[dict[str, float]]) -> dict[str, float]:
    """The figures of several tests as one."""
    total: dict[str, float] = {}
    for reported in figures:
        for name, value in reported.items():
            largest = name.endswith(LARGEST)
            total[name] = max(total.get(name, value), value) if largest else total.get(name, 0) + value
    return total


def table(recorded: dict[str, dict[str, Any]]) -> str:
    """A line for each row; figures as far as a line has room for them."""
    return HEAD + "".join(_line(row, what, recorded.get(row)) for row, what in ROWS.items())


def _line(row: str, what: str, found: dict[str, Any] | None) -> str:
    if found is None:
        return f"| {row} | {what} | | | |\n"
    failed = f", {found['failed']} failed" if found["failed"] else ""
    start = f"| {row} | {what} | {found['date']} | {found['passed']}{failed} |"
    shown: list[str] = []
    for name, value in added_up(found["figures"].values()).items():
        figure = f"{name.replace('_', ' ')} {value:,.4g}"
        if len(f"{start} {', '.join([*shown, figure])} |") <= WIDTH:
            shown.append(figure)
    return f"{start} {', '.join(shown)} |\n" if shown else f"{start} |\n"


def main() -> None:
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(HEAD)
    after = rest.partition("\n\n")[2]
    DOCUMENT.write_text(f"{before}{table(json.loads(RECORD.read_text()))}\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
