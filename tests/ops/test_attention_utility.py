import pytest
import torch

import megasparse.ops.attention_utility.eager as eager
from megasparse.ops.attention_utility import (
    Features,
    bucket_sums,
    exact_keys,
    exact_queries,
    feature_keys,
    feature_queries,
)
from megasparse.ops.attention_utility.reference import utilities
from megasparse.ops.random_features import orthogonal_projections, positive_features

BUCKETS = 5


def random_inputs(queries, keys=None, dtype=torch.float64, batch=2, heads=2, dim=6, seed=0):
    """q, k and their buckets."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (queries, keys or queries)
    x = [torch.randn(batch, heads, n, dim, generator=generator, dtype=torch.float64).to(dtype) for n in lengths]
    return *x, *(torch.randint(0, BUCKETS, (batch, heads, n), generator=generator).to(torch.int16) for n in lengths)


def features_of(x, count=7, dtype=torch.float64):
    projection = orthogonal_projections(3, range(2), count, x.shape[-1], x.device)
    return Features(*positive_features(x.to(dtype), projection, per_row=True))


def whole(tiles, length):
    """The tiles side by side; all tokens come once."""
    tiles = sorted(tiles, key=lambda tile: tile.tokens.start)
    result = torch.cat([tile.utility for tile in tiles], dim=2)
    assert result.shape[2] == length
    return result


@pytest.fixture(params=[1 << 20, 150], ids=["one tile", "many tiles"])
def _tile_sizes(request, monkeypatch):
    monkeypatch.setattr(eager, "_CPU_TILE_ELEMENTS", request.param)


@pytest.mark.usefixtures("_tile_sizes")
@pytest.mark.parametrize("visible", [False, True])
@pytest.mark.parametrize("queries,keys", [(1, 1), (29, 29), (13, 21)])
def test_exact_utilities_are_the_definition(queries, keys, visible):
    if visible and queries != keys:
        return
    q, k, query_codes, key_codes = random_inputs(queries, keys)
    rule = dict(scale=0.7, visible=visible)
    expected = utilities(torch.exp(0.7 * q @ k.transpose(-1, -2)), query_codes, key_codes, BUCKETS, visible)
    ours = whole(exact_queries(q, k, key_codes, BUCKETS, **rule), queries)
    torch.testing.assert_close(ours, expected[0], rtol=1e-10, atol=1e-12)
    ours = whole(exact_keys(q, k, query_codes, BUCKETS, **rule), keys)
    torch.testing.assert_close(ours, expected[1], rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("_tile_sizes")
@pytest.mark.parametrize("visible", [False, True])
@pytest.mark.parametrize("queries,keys", [(1, 1), (29, 29), (13, 21)])
def test_utilities_by_features_are_the_definition_with_their_kernel(queries, keys, visible):
    if visible and queries != keys:
        return
    q, k, query_codes, key_codes = random_inputs(queries, keys)
    q, k = features_of(q), features_of(k)
    phi_q, phi_k = (x.values * torch.exp(x.shift) for x in (q, k))
    expected = utilities(phi_q @ phi_k.transpose(-1, -2), query_codes, key_codes, BUCKETS, visible)
    ours = whole(feature_queries(q, k, key_codes, BUCKETS, visible=visible), queries)
    torch.testing.assert_close(ours, expected[0], rtol=1e-10, atol=1e-12)
    ours = whole(feature_keys(q, k, query_codes, BUCKETS, visible=visible), keys)
    torch.testing.assert_close(ours, expected[1], rtol=1e-10, atol=1e-12)


def test_a_query_that_attends_to_a_bucket_alone_says_so():
    q = torch.eye(4, dtype=torch.float64)[None, None] * 40
    codes = torch.tensor([[[2, 0, 3, 1]]])
    (tile,) = exact_queries(q, q, codes, 4, scale=1.0, visible=False)
    torch.testing.assert_close(tile.utility[0, 0], torch.eye(4, dtype=torch.float64)[codes[0, 0]])


def test_sums_over_buckets_by_features_are_unbiased():
    """φ(q)·Σ_{j in b} φ(k_j) before any normalisation; ψ is a ratio, and biased."""
    q, k, _, codes = random_inputs(6, 12, batch=1, heads=1, dim=4, seed=1)
    q, k = 0.5 * q, 0.5 * k
    score = torch.exp(q @ k.transpose(-1, -2))
    exact = bucket_sums(score.transpose(-1, -2), codes, BUCKETS).transpose(-1, -2)
    draws = []
    for key in range(400):
        projection = orthogonal_projections(key, range(1), 8, 4, q.device)
        q_values, q_shift = positive_features(q, projection, per_row=True)
        k_values, k_shift = positive_features(k, projection, per_row=True)
        sums = bucket_sums(k_values * torch.exp(k_shift), codes, BUCKETS)
        draws.append((q_values * torch.exp(q_shift)) @ sums.transpose(-1, -2))
    estimates = torch.stack(draws)
    error = estimates.std(0) / len(draws) ** 0.5
    assert ((estimates.mean(0) - exact).abs() <= 4 * error).all()
    assert error.max() < 0.1 * exact.max()


def test_more_features_come_nearer_to_the_exact_utilities():
    q, k, query_codes, key_codes = random_inputs(40)
    q, k = 0.3 * q, 0.3 * k
    exact = utilities(torch.exp(q @ k.transpose(-1, -2)), query_codes, key_codes, BUCKETS, False)
    errors = []
    for count in (4, 64, 1024):
        phi_q, phi_k = features_of(q, count), features_of(k, count)
        ours = (
            whole(feature_queries(phi_q, phi_k, key_codes, BUCKETS, visible=False), 40),
            whole(feature_keys(phi_q, phi_k, query_codes, BUCKETS, visible=False), 40),
        )
        errors.append([(a - b).abs().mean() for a, b in zip(ours, exact, strict=True)])
    for side in range(2):
        assert errors[0][side] > 2 * errors[1][side] > 4 * errors[2][side], errors


@pytest.mark.parametrize("visible", [False, True])
@pytest.mark.parametrize("case", ["zero", "equal", "large"])
def test_finite_in_hard_cases(case, visible):
    q, k, query_codes, key_codes = random_inputs(20, dtype=torch.float32)
    changed = {"zero": (q * 0, k * 0), "equal": (q, q), "large": (q * 1e4, k * 1e4)}
    q, k = changed[case]
    phi_q, phi_k = (features_of(x, dtype=torch.float32) for x in (q, k))
    for tiles in (
        exact_queries(q, k, key_codes, BUCKETS, scale=0.4, visible=visible),
        exact_keys(q, k, query_codes, BUCKETS, scale=0.4, visible=visible),
        feature_queries(phi_q, phi_k, key_codes, BUCKETS, visible=visible),
        feature_keys(phi_q, phi_k, query_codes, BUCKETS, visible=visible),
    ):
        total = whole(tiles, 20).sum(-1)
        one = torch.isclose(total, torch.ones(()))
        assert (one | (total == 0)).all()
        assert case == "large" or one.all()


def test_later_tokens_move_no_visible_query_utility():
    """And underflow none: a later key with far larger features takes nothing from earlier queries."""
    q, k, _, codes = random_inputs(20, dtype=torch.float32)
    k[:, :, :12] *= 6  # features below exp(−100)
    k[:, :, 12:] *= 1e-3
    found = []
    for length in (12, 20):
        features = (features_of(x[:, :, :length], dtype=torch.float32) for x in (q, k))
        found.append(whole(feature_queries(*features, codes[..., :length], BUCKETS, visible=True), length)[:, :, :12])
    torch.testing.assert_close(*found)
    assert (found[0].sum(-1) > 0.99).all()
