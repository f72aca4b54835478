"""Trials are kept and not measured again; a verdict is recorded whichever way it goes."""

import json
from dataclasses import replace

import pytest

from tests.claims.claim import Claim, Trials

CASE = Claim("counted", "a paper", "it counts", "the sum is 3", "small", {"minutes": 1}, (0, 1, 2))


def test_a_finished_seed_is_not_measured_again_unless_its_settings_change(tmp_path):
    measured = []

    def measure(trial):
        measured.append(trial.seed)
        return {"x": trial.seed}

    Trials(replace(CASE, seeds=(0, 1)), tmp_path).run(measure)
    assert Trials(CASE, tmp_path).run(measure) == [{"x": 0}, {"x": 1}, {"x": 2}]
    assert measured == [0, 1, 2]
    Trials(replace(CASE, settings={"minutes": 2}, seeds=(0,)), tmp_path).run(measure)
    assert measured == [0, 1, 2, 0]


@pytest.mark.parametrize(("total", "status"), [(3, "verified"), (4, "refuted")])
def test_a_rule_verifies_or_refutes_and_the_result_says_which(tmp_path, total, status):
    trials = Trials(CASE, tmp_path / "counted-small")
    runs = trials.run(lambda trial: {"x": trial.seed})
    try:
        with trials.verdict("the sum is 3", [["x", "3"]]):
            assert sum(run["x"] for run in runs) == total
    except AssertionError:
        assert status == "refuted"
    else:
        assert status == "verified"
    result = json.loads((tmp_path / "counted-small" / "result.json").read_text())
    assert (result["status"], result["found"]) == (status, "the sum is 3. x 3")
    assert "| glue | YOSO" in (tmp_path / "claims.md").read_text()
