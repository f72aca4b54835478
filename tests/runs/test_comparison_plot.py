"""Curves of a comparison: what is read, averaged and refused."""

import json

import pytest

from megasparse.errors import DataError
from megasparse.runs.comparison_plot import mean, plot, read_curves, report


def write_run(folder, curve, test=None, seconds=(0.5,)):
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, max(curve) + 1):
        line = {"step": step, "speed/step_seconds": seconds[step % len(seconds)]}
        lines.append(line | ({"evaluation/bits_per_dim": curve[step]} if step in curve else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if test is not None:
        (folder / "evaluation.json").write_text(json.dumps({"bits_per_dim": test}))


def test_numbers_are_those_of_the_runs_and_arms_are_not_mixed_up(tmp_path):
    write_run(tmp_path / "far-0", {2: 3.0, 4: 2.0}, test=1.5)
    write_run(tmp_path / "far-1", {2: 2.0, 4: 1.0})
    write_run(tmp_path / "far-and_near-0", {2: 9.0})
    lines = plot(tmp_path, ["far", "far-and near", "missing"], tmp_path / "x.svg")
    assert lines[2:] == ["| far | 1 | 4 | 0.50 | 2 | 1.500 |"]
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["far"]["0"] == {"held_out": {"2": 3.0, "4": 2.0}, "test": 1.5, "steps": 4, "step_seconds": 0.5}
    assert found["far"]["1"]["test"] is None and list(found) == ["far", "far-and near"]
    assert list(found["far"]) == ["0", "1"]
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_slow_steps_of_a_busy_machine_do_not_count(tmp_path):
    write_run(tmp_path / "far-0", {40: 3.0}, seconds=(0.5, 9.0))
    assert read_curves(tmp_path, "far")["0"]["step_seconds"] == 0.5


def test_the_mean_is_over_common_steps():
    assert mean([{"50": 3.0, "100": 2.0}, {"50": 1.0}]) == {"50": 2.0}


def test_a_report_sorts_the_arms_and_is_left_out_without_curves(tmp_path):
    assert report(tmp_path, ["far", "near"]) == [] and not (tmp_path / "report.md").exists()
    for seed, test in enumerate((1.0, 3.0)):
        write_run(tmp_path / f"far-{seed}", {2: 3.0}, test=test)
    write_run(tmp_path / "near-0", {4: 3.0}, test=1.25)
    assert [line.split(" | ")[0] for line in report(tmp_path, ["far", "near"])[2:4]] == ["| near", "| far"]
    text = (tmp_path / "report.md").read_text()
    assert "| far | 2 | 2 | 0.50 | 1 | 2.000 ± 1.414 |" in text and "(curves.svg)" in text


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(DataError, match="no arm here has evaluated"):
        plot(tmp_path, ["far"], tmp_path / "x.svg")
