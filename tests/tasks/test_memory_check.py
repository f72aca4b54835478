"""Predicted memory of a run: compared with what it takes, and a run is refused where there is less."""

import json

import numpy as np
import pytest
import torch

from megasparse.errors import UserError
from megasparse.planning.passes import PassBytes
from megasparse.planning.states import require_fit
from megasparse.tasks import memory_check
from megasparse.tasks.memory_check import HINT, predict
from megasparse.training.ranks import Ranks
from tests.helpers import finetuning
from tests.helpers.step_memory import predicted_and_measured

LHA = {"attention": {"pattern": ["lha"], "lha": {"chunk": 64}}}
LSH = {"attention": {"pattern": ["lsh"], "lsh": {"chunk": 64}}}
OURS = {**finetuning.ENCODER, "max_length": 2048, "layers": 3, "d_model": 128, "d_ff": 512}
CASES = {
    "full": {},
    "lha, lora": {"start": LHA, "lora": {"rank": 4}},
    "ours, local": {"start": None, "model": {**OURS, "attention": {"pattern": ["local"], "local": {"chunk": 64}}}},
    "full, one length": {"task": {"max_length": 512}},
    "quick: lha, checkpoint_cpu": {"task": {"max_length": 256}, "start": {**LHA, "activations": "checkpoint_cpu"}},
    "quick: full, one length": {"task": {"max_length": 128}},
}
QUICK = [case for case in CASES if case.startswith("quick")]


def values(folder, case):
    folder.mkdir()
    sections = json.loads(json.dumps(CASES[case]))
    source = finetuning.reviews(folder / "reviews.csv", 12, words=(1900, 2000))
    size = {"hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 512, "max_position_embeddings": 2048}
    start = {"huggingface": str(finetuning.bert(folder / "bert", **size))}
    sections["start"] = {} if "model" in sections else start | sections.get("start", {})
    sections["task"] = {"max_length": 2048, **sections.get("task", {})}
    sections["training"] = {"global_batch": 2, "micro_batch": 2, **sections.get("training", {})}
    sections["evaluation"] = {"batch": 2, "every": 2}
    return finetuning.settings(folder / "run", source, **sections)


SOAK = [pytest.param(case, marks=pytest.mark.soak) for case in CASES if case not in QUICK]


@pytest.mark.parametrize("case", [*QUICK, *SOAK])
def test_peaks_are_within_15_percent_of_what_is_allocated(case, tmp_path, monkeypatch):
    """`pytest -s` prints them. The short ones are predicted from passes as much shorter."""
    if case in QUICK:
        monkeypatch.setattr(memory_check, "LONGEST_TRIAL", 128)
    predicted, allocated = predicted_and_measured(values(tmp_path / "case", case))
    print(f"{case:28} predicted {predicted / 1e6:7.1f} MB, allocated {allocated / 1e6:7.1f}")
    assert abs(predicted / allocated - 1) < 0.15


def tiny(folder, **sections):
    source = finetuning.reviews(folder / "reviews.csv", 24)
    start = {"huggingface": str(finetuning.bert(folder / "bert"))}
    return finetuning.opened(folder / "run", source, start=start, **sections)


def test_a_run_that_cannot_fit_is_refused_with_what_to_change(tmp_path, monkeypatch):
    run = tiny(tmp_path)
    found = predict(run, Ranks())
    assert found.fits and "fits" in found.lines().splitlines()
    assert found.trained == sum(weight.numel() for weight in run.model.parameters()) and found.frozen == 0
    weights = 4 * found.trained
    parts = found.pools[0].parts
    assert (parts["weights"], parts["optimizer"], parts["gradients"]) == (weights, 2 * weights, weights)

    monkeypatch.setattr(memory_check, "available_bytes", lambda device: -weights + found.pools[0].peak // 2)
    prediction = predict(run, Ranks())
    with pytest.raises(UserError, match=r"cannot fit: a step takes about .* of memory, .*Lower training\.micro_batch"):
        require_fit(prediction.pools, Ranks(), HINT, print)
    assert "DOES NOT FIT" in prediction.lines()

    monkeypatch.setattr(memory_check, "available_bytes", lambda device: -weights + int(found.pools[0].peak * 0.95))
    warnings: list[str] = []
    require_fit(predict(run, Ranks()).pools, Ranks(), HINT, warnings.append)
    assert len(warnings) == 1 and warnings[0].startswith("this run may not fit")


def test_predicting_leaves_model_and_generators_as_they_were(tmp_path):
    run = tiny(tmp_path, training={"precision": "bf16"})
    before = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    state, training = torch.get_rng_state(), run.model.training
    predict(run, Ranks())
    assert torch.equal(torch.get_rng_state(), state) and run.model.training == training
    for name, weight in run.model.named_parameters():
        assert weight.dtype == torch.float32 and weight.equal(before[name]) and weight.grad is None


def test_a_peak_is_the_largest_of_its_phases():
    counted = PassBytes(np.array([0.0, 100.0]), np.array([110.0, 430.0]))
    assert counted.peak() == 530 and counted.peak(gradients=7) == 437
