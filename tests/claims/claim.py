"""A claim of a paper as a test: its statement, its rule of acceptance in words, and its budgets.

    pytest -m claims -k "yoso and cpu"      # trials on a CPU, in runs/claims; finished seeds are skipped
    pytest -m claims                        # all of them, including those for a GPU if there is one
    cat runs/claims/claims.md               # the table, updated after each claim

A test fails unless every part of its claim is shown. The rules judge the paper's statement, with equivalence bounds and
paired seeds. They replaced rules that left out a part of the statement, and were written after the recorded trials."""

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from scipy import stats

OUTPUT = Path("runs/claims")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="a trial of hours on a GPU")
Settings = dict[str, Any]
Numbers = dict[str, Any]
"""Measurements of one seed; JSON."""


@dataclass(frozen=True)
class Claim:
    """A claim at one budget. settings: the size of a trial, and its "minutes" per seed."""

    name: str
    paper: str
    statement: str
    rule: str
    budget: str
    settings: Settings
    seeds: Sequence[int]


CLAIMS: list[Claim] = []
"""All claims at all budgets, in file order."""
NOT_ATTEMPTED = {
    "enwik8": ("Reformer, section 5", "1.19 and 1.05 bits/dim on enwik8", "23 and 150 hours of an A100, enwik8"),
    "glue": ("YOSO, Table 2", "GLUE level with BERT after pretraining", "500,000 steps of pretraining, GLUE"),
}
"""Name -> paper, claim, resources that a trial needs."""


def claim(paper: str, statement: str, rule: str, seeds: Sequence[int] = (0, 1, 2), **budgets: Settings) -> Callable:
    """Mark a test as a trial of a claim, which takes the fixture `trials`. budgets: `cpu` and `gpu` run with
    `-m claims`; `small` is an ordinary test of the trial's code, at a size at which the rule also holds."""
    marks = {"small": [pytest.mark.slow], "cpu": [pytest.mark.claims], "gpu": [pytest.mark.claims, NO_GPU]}

    def wrap(test: Callable) -> Callable:
        whole = {name: {**budgets["cpu"], **sizes} if name == "small" else sizes for name, sizes in budgets.items()}
        name = test.__name__.removeprefix("test_")
        cases = [Claim(name, paper, statement, rule, budget, settings, seeds) for budget, settings in whole.items()]
        CLAIMS.extend(cases)
        params = [pytest.param(case, id=case.budget, marks=marks[case.budget]) for case in cases]
        return pytest.mark.parametrize("trials", params, indirect=True)(test)

    return wrap


class Trial(NamedTuple):
    """One seed's measurement, with a folder for its files."""

    settings: Settings
    seed: int
    folder: Path


class Trials:
    """The trials of a claim at a budget, in a folder that stores the numbers of each seed."""

    def __init__(self, claim: Claim, folder: Path):
        self.claim, self.folder = claim, folder

    def run(self, measure: Callable[[Trial], Numbers]) -> list[Numbers]:
        """Measure every seed that is not measured yet with these settings, and return the numbers of all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for seed in self.claim.seeds:
            path = self._path(seed)
            if path.exists() and json.loads(path.read_text())["settings"] == self.claim.settings:
                continue
            start = time.monotonic()
            numbers = measure(Trial(self.claim.settings, seed, self.folder))
            about = {"seconds": round(time.monotonic() - start, 1), "commit": commit(), "torch": torch.__version__}
            record = {"seed": seed, "settings": self.claim.settings, **about, "machine": platform.platform()}
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps({**record, "numbers": numbers}, indent=1) + "\n")
            partial.replace(path)
        return [json.loads(self._path(seed).read_text())["numbers"] for seed in self.claim.seeds]

    def _path(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}.json"

    def verdict(self, sentence: str, parts: dict[str, bool | None], table: Sequence[Sequence[str]] = ()) -> None:
        """Judge the claim and write its outcome to the table of claims.

        Args:
            sentence: The measured result.
            parts: Parts of the claim -> True if the numbers show it, False if they show the opposite, else None.
            table: Rows of the measured numbers.

        Raises:
            AssertionError: Unless every part is shown."""
        values = [*parts.values()]
        if any(values):
            status = "verified" if all(values) else "partly"
        else:
            status = "refuted" if False in values else "not shown"
        records = [json.loads(self._path(seed).read_text()) for seed in self.claim.seeds]
        seconds = statistics.mean(record["seconds"] for record in records)
        commits = ", ".join(sorted({str(record["commit"]) for record in records}))
        effort = f"{self.claim.budget}: {len(records)} × {seconds:.0f} s, commit {commits}"
        words = {True: "shown", False: "refuted", None: "not shown"}
        judged = "; ".join(f"{part}: {words[value]}" for part, value in parts.items())
        rows = "; ".join(" ".join(row) for row in table)
        result = {"status": status, "result": f"{sentence}. {judged}. {rows}".rstrip(". "), "trials": effort}
        (self.folder / "result.json").write_text(json.dumps(result) + "\n")
        write_table(self.folder.parent)
        assert status == "verified", f"{self.claim.name}: {judged}"


def commit() -> str | None:
    """Return the commit of this source tree, with a + if it was changed; None outside a repository."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_table(output: Path) -> None:
    """Write OUTPUT/claims.md, one row per claim, from the results below OUTPUT."""
    head = ["claim", "paper", "status", "result", "rule", "trials"]
    rows = [head, ["---"] * len(head)]
    for case in CLAIMS:
        path = output / f"{case.name}-{case.budget}" / "result.json"
        if path.exists():
            result = json.loads(path.read_text())
            cells = [case.name, f"{case.paper}: {case.statement}", result["status"], result["result"], case.rule]
            rows.append([*cells, result["trials"]])
    for name, (paper, statement, missing) in NOT_ATTEMPTED.items():
        rows.append([name, f"{paper}: {statement}", "not attempted", f"takes {missing}", "", ""])
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    (output / "claims.md").write_text("\n".join(["# Claims", "", *lines]) + "\n", encoding="utf-8")


def mean_of(runs: Sequence[Numbers], key: str) -> list[float]:
    """Return the mean over the seeds of a list of numbers."""
    return [statistics.mean(column) for column in zip(*(run[key] for run in runs), strict=True)]


def shown_below(differences: Sequence[float], bound: float = 0.0) -> bool | None:
    """Compare the mean of paired differences with a bound by its one-sided 95 % interval (Student's t): True if the
    whole interval is below the bound, False if it is above, None if it contains it."""
    half = float(stats.t.ppf(0.95, len(differences) - 1)) * statistics.stdev(differences) / len(differences) ** 0.5
    mean = statistics.mean(differences)
    return True if mean + half < bound else False if mean - half > bound else None


def together(values: Iterable[bool | None]) -> bool | None:
    """Join verdicts on the cases of one part: True if all are shown, False if one is refuted, else None."""
    verdicts = [*values]
    return False if False in verdicts else None if None in verdicts else True
