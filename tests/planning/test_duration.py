"""What a run says before its first step where it takes hours here."""

import pytest
import torch

from megasparse.planning import duration
from megasparse.training.ranks import Ranks

HOUR = 3600.0


def speed(precision):
    return {"fp32": 100e9, "bf16": 40e9}[precision]


@pytest.mark.parametrize(("precision", "gflops"), [("fp32", 100), ("bf16", 40)])
def test_hours_are_flops_by_a_share_of_the_speed_of_products(precision, gflops):
    said = duration.long_run(5 * HOUR * 0.3 * gflops * 1e9, precision, ["fewer training.steps"], speed)
    assert "about 5 hours on this machine" in said and f"of the {gflops} GFLOP/s" in said
    assert said.endswith("fewer training.steps; a GPU")
    assert ('Quicker: training.precision="fp32", 2.5 times as fast here; ' in said) == (precision == "bf16")


def test_a_run_of_minutes_says_nothing():
    assert duration.long_run(1.9 * HOUR * 0.3 * 100e9, "fp32", [], speed) is None


@pytest.mark.parametrize(("rank", "device", "lines"), [(0, "cpu", 1), (1, "cpu", 0), (0, "meta", 0)])
def test_only_the_first_rank_on_cpus_says_it(rank, device, lines, monkeypatch, capsys):
    monkeypatch.setattr(duration, "long_run", lambda flops, precision, changes: f"{flops:g} in {precision}")
    duration.warn_if_long(6e15, "fp32", [], Ranks(rank=rank, world_size=2, device=torch.device(device)))
    assert capsys.readouterr().err == "3e+15 in fp32\n" * lines


def test_products_are_timed():
    assert 1e6 < duration.product_speed("fp32") < 1e15
