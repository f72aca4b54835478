"""Measures of attention against their definitions, and the attention matrices that the measures read."""

import itertools

import pytest
import torch

from megasparse.attention.observation import calls
from megasparse.evaluation.attention.assignment import balanced, cut, lsh_scores, random_codes, smyrf_values
from megasparse.evaluation.attention.metrics import (
    attention_utility,
    attention_weights,
    imbalance,
    largest_error,
    recall_of_top,
    relative_error,
    same_bucket,
    upper_bound,
)
from megasparse.evaluation.attention.quality import record_calls
from megasparse.evaluation.attention.weights import attention_map, weights_of
from megasparse.evaluation.pictures import BACKGROUND
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.ops.unit_keys import unit_vectors
from tests.helpers.models import EVERY, named, random_tokens, small


def heads(length: int, seed: int = 0, batch: int = 2, width: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 3, length, width, generator=generator) for _ in range(3)]


def sizes(codes: torch.Tensor, buckets: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(codes, buckets).sum(-2)


def test_utility_is_the_attention_inside_the_buckets():
    q, k, _ = heads(6)
    weights = attention_weights(q, k)
    torch.testing.assert_close(weights, torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1))
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
    ratio. Of sizes 8, 3, 5, 0 where 4 is even, only 0 is off by more than twice.
    """
    queries = torch.tensor([0] * 6 + [1] + [2]).expand(1, 2, 8)
    keys = torch.tensor([0] * 2 + [1] * 2 + [2] * 4).expand(1, 2, 8)
    found = imbalance(queries, keys, 4)
    assert found.ratio.tolist() == [[pytest.approx(2 / 3)] * 2]
    assert found.size.tolist() == [[0.25] * 2] and found.largest.tolist() == [[0.5] * 2]
    alone = imbalance(torch.zeros(1, 1, 8, dtype=torch.long), torch.ones(1, 1, 8, dtype=torch.long), 4)
    assert alone.ratio == 1.0 and alone.size == 0.5


@pytest.mark.parametrize("length,buckets", [(64, 4), (37, 4), (5, 4), (4, 4), (63, 2)])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_balanced_buckets_are_equal(length, buckets, scale):
    scores = torch.randn(2, 3, length, buckets, generator=torch.Generator().manual_seed(0)) + torch.arange(buckets)
    count = sizes(balanced(scale * scores), buckets)
    assert count.min() >= length // buckets and count.max() <= -(-length // buckets)


def test_boundaries_move_and_order_stays():
    """Between two buckets the balanced assignment is the order by the difference of the scores, cut in the middle."""
    scores = torch.randn(2, 3, 64, 2, generator=torch.Generator().manual_seed(0)) + torch.tensor([3.0, 0.0])
    torch.testing.assert_close(balanced(scores), cut(scores[..., 1] - scores[..., 0], 2))


def test_moved_boundaries_lose_less_than_refusing_whom_there_is_no_room_for():
    scores = torch.randn(2, 3, 64, 4, generator=torch.Generator().manual_seed(0)) + torch.tensor([3.0, 1.0, 0.0, 0.0])
    moved, refused = (
        scores.log_softmax(-1).gather(-1, codes.unsqueeze(-1)).sum((-1, -2))
        for codes in (balanced(scores), balanced(scores, sweeps=0))
    )
    assert (moved > refused).all()


def test_codes_that_are_equal_already_stay():
    codes = torch.arange(64) % 4
    scores = 9.0 * torch.nn.functional.one_hot(codes, 4)
    torch.testing.assert_close(balanced(scores), codes)


def test_random_buckets_are_equal_and_worth_one_share():
    q, k, _ = heads(256, batch=8)
    codes = random_codes(q, 4, key=5)
    assert all((sizes(x, 4) == 64).all() for x in codes) and not codes[0].equal(codes[1])
    utility = attention_utility(attention_weights(q, k), same_bucket(*codes)).flatten()
    assert abs(float(utility.mean()) - 0.25) < 3 * float(utility.std()) / len(utility) ** 0.5


def test_every_window_has_hashes_of_its_own_however_many_are_measured_at_once():
    q, k, _ = heads(16)
    torch.testing.assert_close(lsh_scores(q, 4, 7)[1:], lsh_scores(q[1:], 4, 7, first=1))
    for whole, single in zip(smyrf_values(q, k, 7), smyrf_values(q[1:], k[1:], 7, first=1), strict=True):
        torch.testing.assert_close(whole[1:], single)
    assert not lsh_scores(q[:1], 4, 7).allclose(lsh_scores(q[:1], 4, 7, first=1))


def test_hashes_find_more_than_chance():
    """Queries near the keys that they attend to: LSH and SMYRF keep more of the attention than random buckets."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.randn(1, 3, 8, 8, generator=generator).repeat_interleave(16, dim=2)
    q, k = (3 * (centre + 0.2 * torch.randn(1, 3, 128, 8, generator=generator)) for _ in range(2))
    weights = attention_weights(q, k)
    lsh = [balanced(lsh_scores(x, 4, 7)) for x in (q, k)]
    smyrf = [cut(x, 4) for x in smyrf_values(q, k, 7)]
    for codes in (lsh, smyrf):
        assert attention_utility(weights, same_bucket(*codes)).mean() > 0.45


def observed(name: str, causal: bool, length: int = 40):
    config = small(attention=named(name), kind="decoder" if causal else "encoder", vocabulary=257, layers=1)
    return record_calls(build_model(config, 0), random_tokens(2, length), 0)


@EVERY
def test_the_matrix_of_every_mechanism_gives_its_output(name, causal):
    (call,) = observed(name, causal)
    for mechanism in (call.mechanism.without_additions(), call.exact()):
        weights = weights_of(call, mechanism)
        out = weights @ call.inputs.v
        out = unit_vectors(out) if mechanism.normalises else out
        torch.testing.assert_close(out, call.run(mechanism), rtol=1e-4, atol=1e-5)
    sums = weights_of(call, call.exact()).sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_calls_are_heard_only_inside_the_with():
    config = small(("local", {"local": 1, "lsh": 1}), layers=2)
    model = build_model(config, 0).eval()
    with torch.no_grad(), calls(model) as found:
        model(random_tokens(1, 16), RngContext.evaluation(0, 1))
    assert [(call.context.layer, call.kind) for call in found] == [(0, "local"), (1, "local"), (1, "lsh")]
    assert [call.inputs.q.shape[1] for call in found] == [2, 1, 1]
    model(random_tokens(1, 16), RngContext.evaluation(0, 1))
    assert len(found) == 3


def test_more_rounds_come_nearer_to_full_attention():
    (call,) = record_calls(build_model(small(("lsh",), layers=1), 0), random_tokens(2, 128), 0)
    exact = call.run(call.exact())
    errors = [float(relative_error(call.run(call.mechanism, rounds=n), exact).mean()) for n in (1, 4, 16)]
    assert errors[0] > errors[1] > errors[2]


def test_maps_show_what_is_seen():
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
