"""Mutants of every kind of file that comes from elsewhere, and forged sizes: refused in one line, in little memory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import fuzzing
from tests.helpers.fuzzing import Format, fuzz
from tests.reliability.readers import FORMATS

ROOT = Path(__file__).parents[2]
CASES = 40


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "export" else name for name in FORMATS]
)
def test_mutants_are_read_or_refused_in_one_line(name, tmp_path):
    (tmp_path / "seeds").mkdir()
    FORMATS[name].make(tmp_path / "seeds")
    shutil.copytree(tmp_path / "seeds", tmp_path / "whole")
    FORMATS[name].read(tmp_path / "whole")
    cases = list(fuzz(name, FORMATS[name], tmp_path / "seeds", tmp_path / "mutant", range(CASES)))
    assert len(cases) == CASES
    assert not [case for case in cases if case.outcome not in ("read", "refused")]
    assert sum(case.outcome == "refused" for case in cases) > CASES // 10


def failing(folder: Path) -> None:
    """Fail in each of the ways that the fuzzer is to see, by the number that the file `how` has."""
    how = (folder / "how").read_bytes()[:1]
    if how == b"e":
        raise KeyError("uncaught")
    if how == b"m":
        bytes(bytearray(fuzzing.MOST_BYTES))
    if how == b"t":
        while True:
            pass
    if how == b"d":
        import ctypes
        import faulthandler

        faulthandler.disable()  # whose trace would stand among the tests' output
        ctypes.string_at(0)


@pytest.mark.parametrize(
    ("how", "outcome"), [("e", "KeyError: 'uncaught'"), ("m", "took 1"), ("t", "took too long"), ("d", "died (11)")]
)
def test_the_fuzzer_sees_what_must_not_be(tmp_path, monkeypatch, how, outcome):
    monkeypatch.setattr(fuzzing, "mutate", lambda *_: None)
    monkeypatch.setattr(fuzzing, "MOST_SECONDS", 0.3 if how == "t" else 5)
    monkeypatch.setattr(fuzzing, "MOST_BYTES", 64 << 20)
    (tmp_path / "seeds").mkdir()
    (tmp_path / "seeds" / "how").write_text(how)
    cases = list(fuzz("failing", Format(print, failing), tmp_path / "seeds", tmp_path / "mutant", range(2)))
    assert [case.number for case in cases] == [0, 1]
    assert all(case.outcome.startswith(outcome) for case in cases)


@pytest.mark.soak
def test_twenty_thousand_mutants(tmp_path):
    command = [sys.executable, "-m", "tests.reliability.readers", "--cases", "20000", "--json", tmp_path / "x.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads((tmp_path / "x.json").read_text())["failed"] == 0, done.stdout
