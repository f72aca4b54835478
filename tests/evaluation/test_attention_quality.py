"""Measures of attention against their definitions, the matrices that they read, and a run that reports them."""

import dataclasses
import itertools

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasparse.attention.observation import Call, calls
from megasparse.evaluation.attention_quality import (
    attention_map,
    attention_utility,
    imbalance,
    measure,
    recall_of_top,
    record_calls,
    relative_error,
    upper_bound,
    weights_of,
)
from megasparse.evaluation.images import BACKGROUND
from megasparse.model.build import build_model
from megasparse.ops.normalize import unit_vectors
from megasparse.ops.random import RngContext
from tests.helpers.models import EVERY, named, random_tokens, small
from tests.helpers.trained import prepared, trained
from tools.study_attention import largest_error

NAMES = {"output_error", "recall_top", "utility", "utility_bound", "utility_floor"}


def attention_weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1)


def same_bucket(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return queries[:, None] == keys


def heads(length: int, seed: int = 0, batch: int = 2, width: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 3, length, width, generator=generator) for _ in range(3)]


def test_utility_is_the_attention_inside_the_buckets():
    q, k, _ = heads(6)
    weights = attention_weights(q, k)
    query_codes, key_codes = torch.tensor([0, 1, 1, 0, 2, 2]), torch.tensor([2, 1, 0, 1, 0, 2])
    found = attention_utility(weights, same_bucket(query_codes, key_codes))
    for b, h in itertools.product(range(2), range(3)):
        pairs = [(i, j) for i in range(6) for j in range(6) if query_codes[i] == key_codes[j]]
        assert found[b, h] == pytest.approx(sum(float(weights[b, h, i, j]) for i, j in pairs) / 6, rel=1e-5)


def test_no_equal_assignment_exceeds_the_upper_bound():
    q, k, _ = heads(6)
    weights = attention_weights(4 * q, k)
    bound = upper_bound(weights, 2)
    splits = [torch.tensor(codes) for codes in set(itertools.permutations([0, 0, 1, 1, 2, 2]))]
    best = torch.stack([attention_utility(weights, same_bucket(a, b)) for a in splits[::5] for b in splits]).amax(0)
    assert (best <= bound + 1e-6).all() and (best > 0.8 * bound).all()
    counts = torch.tensor([0, 1, 2, 3, 6, 6]).expand(2, 3, 6)
    mixed = sum(weights[:, :, i].sort(descending=True).values[..., :n].sum(-1) for i, n in enumerate(counts[0, 0]))
    torch.testing.assert_close(upper_bound(weights, counts), mixed / 6)


def test_recall_counts_the_largest_weights_found():
    exact = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]])
    sparse = torch.tensor([[0.6, 0.0, 0.4, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert recall_of_top(exact, sparse, 2) == pytest.approx((1 / 2 + 0) / 2)
    assert recall_of_top(exact, exact, 9) == 1.0
    assert recall_of_top(exact[:1], exact[:1] * torch.tensor([1, 1, 0, 1]), 4) == pytest.approx(2 / 3)


def test_relative_error():
    out, exact = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [6.0, 8.0]])
    assert relative_error(out, exact) == pytest.approx((25 + 100) ** 0.5 / 10)
    assert relative_error(exact, exact) == 0.0 and relative_error(0 * out, 0 * exact) == 0.0


def test_largest_error():
    exact = torch.tensor([[[3.0, -8.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 2.0]]])
    out = torch.tensor([[[5.0, -8.0], [-4.0, 1.0]], [[1.0, 0.0], [0.0, 2.0]]])
    assert largest_error(out, exact).tolist() == [0.5, 0.0] and largest_error(0 * out, 0 * exact).tolist() == [0.0, 0.0]


def test_imbalance_of_buckets():
    """Queries per bucket 6, 1, 1, 0; keys 2, 2, 4, 0: 3:1 and 1:4 are imbalanced, 1:2 is not, the empty one is no
    ratio. Of sizes 8, 3, 5, 0 where 4 is even, only 0 is off by more than twice."""
    queries = torch.tensor([0] * 6 + [1] + [2]).expand(1, 2, 8)
    result = imbalance(queries, torch.tensor([0] * 2 + [1] * 2 + [2] * 4).expand(1, 2, 8), 4)
    assert result.ratio.tolist() == [[pytest.approx(2 / 3)] * 2]
    assert result.size.tolist() == [[0.25] * 2] and result.largest.tolist() == [[0.5] * 2]
    alone = imbalance(torch.zeros(1, 1, 8, dtype=torch.long), torch.ones(1, 1, 8, dtype=torch.long), 4)
    assert alone.ratio == 1.0 and alone.size == 0.5


def observed(name: str, causal: bool, length: int = 40):
    config = small(attention=named(name), kind="decoder" if causal else "encoder", vocabulary=257, layers=1)
    return record_calls(build_model(config, 0), random_tokens(2, length), 0)


@EVERY
def test_the_matrix_of_every_mechanism_gives_its_output(name, causal):
    (call,) = observed(name, causal)
    for mechanism in (call.mechanism.without_additions(), call.exact()):
        out = weights_of(call, mechanism) @ call.inputs.v
        out = unit_vectors(out) if mechanism.normalises else out
        torch.testing.assert_close(out, call.run(mechanism), rtol=1e-4, atol=1e-5)
    sums = weights_of(call, call.exact()).sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_calls_are_heard_only_inside_the_with():
    model = build_model(small(("local", {"local": 1, "lsh": 1}), layers=2), 0).eval()
    with torch.no_grad(), calls(model) as found:
        model(random_tokens(1, 16), RngContext.evaluation(0, 1))
    assert [(call.context.layer, call.kind) for call in found] == [(0, "local"), (1, "local"), (1, "lsh")]
    assert [call.inputs.q.shape[1] for call in found] == [2, 1, 1]
    model(random_tokens(1, 16), RngContext.evaluation(0, 1))
    assert len(found) == 3


def test_maps_show_the_visible_keys():
    weights = torch.tensor([[0.8, 0.2], [0.5, 0.5]])
    picture = attention_map(weights, torch.tensor([[True, False], [True, True]]))
    assert picture.shape == (2, 2, 3) and picture.dtype == torch.uint8
    assert picture[0, 0].tolist() == [0, 0, 0] and picture[0, 1].tolist() == [255, 255, 255]
    faint = attention_map(torch.tensor([[1.0, 0.0]]).expand(2, 2), torch.ones(2, 2, dtype=torch.bool))
    assert faint[0, 1].tolist() == [191, 222, 255]
    half = attention_map(weights, torch.ones(2, 2, dtype=torch.bool), causal=True)
    assert half[0, 1].tolist() == list(BACKGROUND) and half[0, 0].tolist() == half[1, 1].tolist() == [0, 0, 0]
    small_one = attention_map(torch.rand(3, 64, 64), torch.ones(3, 64, 64, dtype=torch.bool), size=16)
    assert small_one.shape == (3, 16, 16, 3)


@pytest.mark.parametrize("name", ["lsh", "lsh separate", "lha"])
@pytest.mark.parametrize("causal", [True, False])
def test_buckets_of_mechanisms_that_have_them(name, causal):
    call = observed(name, causal)[0]
    queries, keys, buckets = call.mechanism.buckets_of(call.inputs, call.context)
    assert queries.shape[::2] == keys.shape[::2] == (2, 40) and max(queries.max(), keys.max()) < buckets
    shared = name == "lsh" or (name == "lha" and causal)
    assert queries.equal(keys) == shared
    if shared:
        assert (imbalance(queries, keys, buckets).ratio == 0).all()


def test_a_mechanism_that_does_not_hash_has_no_buckets():
    call = observed("local", True)[0]
    assert call.mechanism.buckets_of(call.inputs, call.context) is None


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


def test_measures_of_local_attention_equal_its_band():
    call = local_call()
    exact, own = (weights_of(call, mechanism) for mechanism in (call.exact(), call.mechanism))
    row = torch.arange(64)
    band = (row <= row[:, None]) & (row // 8 >= row[:, None] // 8 - 1)
    found = measure(call, exact, own)
    assert found["utility"] == pytest.approx(float((exact * band).sum(-1).mean()), rel=1e-5)
    assert found["utility_floor"] == pytest.approx(float((band.sum(-1) / (row + 1)).mean()), rel=1e-5)
    assert 0 < found["output_error"] < 2
    itself = measure(dataclasses.replace(call, mechanism=call.exact()), exact, exact)
    assert itself == {name: pytest.approx(float(name != "output_error")) for name in NAMES}
