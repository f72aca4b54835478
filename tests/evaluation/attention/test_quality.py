"""Attention quality inside training: what is measured, when, and that it changes nothing. Training LHA's hashes."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasparse.attention.hash_training import hash_scores, train_hashes
from megasparse.attention.observation import Call, calls
from megasparse.evaluation.attention.metrics import attention_utility, attention_weights, same_bucket
from megasparse.evaluation.attention.quality import measure, record_calls
from megasparse.evaluation.attention.study import Interval, _sketch
from megasparse.evaluation.attention.weights import weights_of
from megasparse.model.build import build_model
from megasparse.ops.sketch.reference import sketched_weights
from tests.helpers.models import Single, random_tokens, small
from tests.helpers.trained import prepared, trained

NAMES = {"output_error", "recall_top", "utility", "utility_bound", "utility_floor"}


def test_a_run_measures_its_attention_when_asked(tmp_path):
    data, pattern = prepared(tmp_path), ["local", {"lsh": 2, "local": 2}, "full"]
    evaluation = {"every": 3, "sequences": 2}
    asked, plain = (
        trained(
            data, tmp_path / str(every), pattern, 5, evaluation=evaluation, logging={"attention_quality_every": every}
        )
        for every in (2, 0)
    )
    found = [{name for name in line if name.startswith("quality/")} for line in asked]
    expected = {f"quality/{kind}/{name}" for kind in ("local", "lsh") for name in NAMES}
    expected |= {f"quality/lsh/bucket_{name}" for name in ("ratio", "size", "largest")}
    assert found == [set(), expected, set(), expected, set()]
    assert ["evaluation/loss" in line for line in asked] == [False, False, True, False, False]
    for mine, other in zip(asked, plain, strict=True):
        assert not any(name.startswith("quality/") for name in other)
        assert mine["train/loss"] == other["train/loss"]  # nothing else of the run has changed
    for line in (asked[1], asked[3]):
        for kind in ("local", "lsh"):
            assert line[f"quality/{kind}/utility"] <= line[f"quality/{kind}/utility_bound"] + 1e-6
            assert 0 < line[f"quality/{kind}/utility_floor"] < 1 and 0 <= line[f"quality/{kind}/recall_top"] <= 1
    board = EventAccumulator(str(tmp_path / "2" / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("quality/lsh/utility")] == [2, 4]
    assert [event.step for event in board.Images("quality/lsh/maps")] == [2, 4]


def local_call() -> Call:
    model = build_model(small(("local",), layers=1), 0).train()
    (call,) = record_calls(model, random_tokens(1, 64), 0)
    assert model.training
    return call


def test_measures_of_local_attention_are_those_of_its_band():
    call = local_call()
    exact, own = (weights_of(call, mechanism) for mechanism in (call.exact(), call.mechanism))
    row = torch.arange(64)
    band = (row <= row[:, None]) & (row // 8 >= row[:, None] // 8 - 1)
    found = measure(call, exact, own)
    assert found["utility"] == pytest.approx(float((exact * band).sum(-1).mean()), rel=1e-5)
    assert found["utility_floor"] == pytest.approx(float((band.sum(-1) / (row + 1)).mean()), rel=1e-5)
    assert 0 < found["output_error"] < 2
    itself = measure(call.replaced(call.exact()), exact, exact)
    assert itself == {name: pytest.approx(float(name != "output_error")) for name in NAMES}


def planted(seed: int) -> list[Call]:
    """Queries and keys of 8 directions each. A query attends to one kind of key, which only the attention can show."""
    directions = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    answers = 4 * torch.linalg.pinv(directions).T
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, 1, 2, 64, 16, generator=generator)
    kinds = torch.randint(0, 8, (2, 64), generator=generator)
    q, k = 4 * directions[kinds[0]] + 0.1 * noise[0], 4 * answers[kinds[1]] + 0.02 * noise[1]
    call = local_call()
    return [dataclasses.replace(call, inputs=call.inputs._replace(q=q, k=k))]


@pytest.mark.parametrize("utility", ["exact", "sampled"])
def test_trained_hashes_find_planted_buckets_and_do_not_collapse(utility):
    (mechanism,), history = train_hashes(map(planted, range(80)), buckets=4, seed=0, utility=utility)
    assert history[-1] < 0.3 * history[0]
    (call,) = planted(1000)
    codes = [scores.argmax(-1) for scores in hash_scores(mechanism, call)]
    weights = attention_weights(call.inputs.q, call.inputs.k)
    assert weights.amax(-1).mean() > 0.05  # the plan works: a query attends to one kind of key
    assert attention_utility(weights, same_bucket(*codes)).min() > 0.8
    for side in codes:
        assert F.one_hot(side, 4).sum(-2).max() <= 40, "most tokens fell into one bucket"


def test_interval_of_a_mean():
    """Against Student's t of 9 degrees of freedom, 2.262157."""
    interval = Interval.of([float(x) for x in range(10)])
    assert interval.mean == 4.5
    assert interval.half == pytest.approx(2.262157 * (82.5 / 9) ** 0.5 / 10**0.5, rel=2e-4)


@pytest.mark.parametrize("name", ["smart_bird", "smart_bird transformer"])
def test_the_shares_of_a_sketchs_scores_are_counted_over_visible_pairs(name):
    single = Single(name, True)
    inputs = [t[:1] for t in single.inputs(12)]
    with calls(single.mechanism) as found:
        single(*inputs)
    q, k = found[0].mechanism.sketched(found[0].x, found[0].inputs, found[0].context)
    alpha, seen = sketched_weights(q, k, causal=True)
    pairs = [float(alpha[0, i, j]) for i in range(12) for j in range(i + 1)]
    assert int(seen.sum()) == len(pairs) and sum(pairs) == pytest.approx(12)
    shares = _sketch(found[0])
    for kind, score in {
        "weight": lambda a: a,
        "inverse_log": lambda a: math.inf if a == 1 else -1 / math.log(a),
        "inverse_log_squared": lambda a: math.inf if a == 1 else math.log(a) ** -2,
    }.items():
        tenths = [min(9, int(10 * min(score(a), 1.0))) for a in pairs]
        expected = {f"sketch/{kind}/{i / 10}": tenths.count(i) / len(pairs) for i in range(10)}
        assert {key: shares[key] for key in expected} == pytest.approx(expected)
