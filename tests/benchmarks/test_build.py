"""A rank's share of a model, built alone: as many bytes as the planner counts."""

import json

import pytest

from megasparse.cli.main import main
from tests.helpers.commands import refused

SETTINGS = [
    "training.precision=bf16",
    'deepspeed={"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}}',
    "model.d_model=128",
    "model.layers=4",
]


WORDS = ["bench", "build", "quickstart", *(word for each in SETTINGS for word in ("--set", each))]


def test_an_eighth_is_built_without_the_other_ranks(tmp_path, capsys):
    main([*WORDS, "--ranks", "8", "--json", str(tmp_path / "build.json")])
    found = json.loads((tmp_path / "build.json").read_text())
    weights, eighth = found["weights"], 2 * found["weights"] / 8
    assert eighth <= found["pieces"] <= 1.01 * eighth
    assert found["pieces"] + 8 * weights / 8 <= found["held"] <= found["peak"] < 2 * weights
    assert found["peak"] == pytest.approx(found["planned"], rel=0.05)
    assert found["resident"] > 0 and found["build_seconds"] > found["meta_seconds"]
    assert "| peak, counted |" in capsys.readouterr().out


def test_what_has_no_pieces_is_refused(capsys):
    stage = 'deepspeed={"zero_optimization": {"stage": 2}}'
    assert "stage: 2 leaves every rank the whole model" in refused(capsys, main, *WORDS, "--set", stage)
