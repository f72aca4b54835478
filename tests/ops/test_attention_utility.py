import pytest
import torch

import megasparse.ops.attention_utility.blockwise as blockwise
from megasparse.ops.attention_utility import (
    Features,
    bucket_sums,
    exact_keys,
    exact_queries,
    feature_keys,
    feature_queries,
)
from megasparse.ops.attention_utility.reference import utilities
from megasparse.ops.linear_attention import orthogonal_projections, positive_features

BUCKETS = 5


def random_inputs(queries, keys=None, dtype=torch.float64, batch=2, heads=2, dim=6, seed=0):
    """Return q, k and the members of their buckets, M of each; a token may be in several or in none."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (queries, keys or queries)
    x = [torch.randn(batch, heads, n, dim, generator=generator, dtype=torch.float64).to(dtype) for n in lengths]
    sizes = (batch, heads, BUCKETS)
    order = [torch.rand(*sizes, n, generator=generator).argsort(-1) for n in lengths]
    return *x, *(o[..., : max(1, n // 3)].to(torch.int32) for o, n in zip(order, lengths, strict=True))


def membership(members, length):
    """(B, H, L, N), 1 where a token is in a bucket."""
    found = torch.zeros(*members.shape[:3], length, dtype=torch.float64)
    return found.scatter_(-1, members.long(), 1.0).transpose(-1, -2)


def definition(kernel, query_members, key_members, visible):
    return utilities(
        kernel, membership(query_members, kernel.shape[2]), membership(key_members, kernel.shape[3]), visible
    )


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
    monkeypatch.setattr(blockwise, "_CPU_TILE_ELEMENTS", request.param)


@pytest.mark.usefixtures("_tile_sizes")
@pytest.mark.parametrize("by_features", [False, True])
@pytest.mark.parametrize(
    "queries,keys,visible", [(1, 1, True), (29, 29, True), (1, 1, False), (29, 29, False), (13, 21, False)]
)
def test_utilities_are_the_definition(queries, keys, visible, by_features):
    """With features, the definition with their kernel."""
    q, k, query_members, key_members = random_inputs(queries, keys)
    if by_features:
        q, k = features_of(q), features_of(k)
        phi_q, phi_k = (x.values * torch.exp(x.shift) for x in (q, k))
        kernel = phi_q @ phi_k.transpose(-1, -2)
        ours = feature_queries(q, k, key_members, visible=visible), feature_keys(q, k, query_members, visible=visible)
    else:
        kernel, rule = torch.exp(0.7 * q @ k.transpose(-1, -2)), dict(scale=0.7, visible=visible)
        ours = exact_queries(q, k, key_members, **rule), exact_keys(q, k, query_members, **rule)
    expected = definition(kernel, query_members, key_members, visible)
    for tiles, length, dense in zip(ours, (queries, keys), expected, strict=True):
        torch.testing.assert_close(whole(tiles, length), dense, rtol=1e-10, atol=1e-12)


def test_a_query_that_attends_to_a_bucket_alone_says_so():
    q = torch.eye(4, dtype=torch.float64)[None, None] * 40
    members = torch.tensor([[[[1], [3], [0], [2]]]])
    (tile,) = exact_queries(q, q, members, scale=1.0, visible=False)
    torch.testing.assert_close(tile.utility[0, 0], torch.eye(4, dtype=torch.float64)[[2, 0, 3, 1]])


def test_sums_over_buckets_by_features_are_unbiased():
    """Only φ(q)·Σ_{j in b} φ(k_j), before any normalisation, is unbiased; ψ is a ratio."""
    q, k, _, members = random_inputs(6, 12, batch=1, heads=1, dim=4, seed=1)
    q, k = 0.4 * q, 0.4 * k
    score = torch.exp(q @ k.transpose(-1, -2))
    exact = bucket_sums(score.transpose(-1, -2), members).transpose(-1, -2)
    rng = []
    for key in range(400):
        projection = orthogonal_projections(key, range(1), 8, 4, q.device)
        q_values, q_shift = positive_features(q, projection, per_row=True)
        k_values, k_shift = positive_features(k, projection, per_row=True)
        sums = bucket_sums(k_values * torch.exp(k_shift), members)
        rng.append((q_values * torch.exp(q_shift)) @ sums.transpose(-1, -2))
    estimates = torch.stack(rng)
    error = estimates.std(0) / len(rng) ** 0.5
    assert ((estimates.mean(0) - exact).abs() <= 4 * error).all()
    assert error.max() < 0.1 * exact.max()


def test_more_features_come_nearer_to_the_exact_utilities():
    q, k, query_members, key_members = random_inputs(40)
    q, k = 0.3 * q, 0.3 * k
    exact = definition(torch.exp(q @ k.transpose(-1, -2)), query_members, key_members, False)
    errors = []
    for count in (4, 64, 1024):
        phi_q, phi_k = features_of(q, count), features_of(k, count)
        ours = (
            whole(feature_queries(phi_q, phi_k, key_members, visible=False), 40),
            whole(feature_keys(phi_q, phi_k, query_members, visible=False), 40),
        )
        errors.append([(a - b).abs().mean() for a, b in zip(ours, exact, strict=True)])
    for side in range(2):
        assert errors[0][side] > 1.8 * errors[1][side] > 1.8**2 * errors[2][side], errors


@pytest.mark.parametrize("visible", [False, True])
@pytest.mark.parametrize("case", ["zero", "equal", "large"])
def test_finite_in_hard_cases(case, visible):
    q, k, query_members, key_members = random_inputs(20, dtype=torch.float32)
    changed = {"zero": (q * 0, k * 0), "equal": (q, q), "large": (q * 1e4, k * 1e4)}
    q, k = changed[case]
    phi_q, phi_k = (features_of(x, dtype=torch.float32) for x in (q, k))
    for tiles in (
        exact_queries(q, k, key_members, scale=0.4, visible=visible),
        exact_keys(q, k, query_members, scale=0.4, visible=visible),
        feature_queries(phi_q, phi_k, key_members, visible=visible),
        feature_keys(phi_q, phi_k, query_members, visible=visible),
    ):
        total = whole(tiles, 20).sum(-1)
        one = torch.isclose(total, torch.ones(()))
        assert (one | (total == 0)).all()
        assert case == "large" or visible or one.all()  # the first queries may see no member of any bucket


def test_later_tokens_move_no_visible_query_utility():
    """And underflow none: a later key with far larger features takes nothing from earlier queries."""
    q, k, _, members = random_inputs(12, dtype=torch.float32)
    q, k = (torch.cat([x, x[:, :, :8].flip(2)], dim=2) for x in (q, k))
    later = torch.arange(12, 17).view(BUCKETS, 1).expand(2, 2, -1, -1)  # a later member of each bucket
    lists = {12: members, 20: torch.cat([members, later], dim=-1)}
    k[:, :, :12] *= 6  # features below exp(−100)
    k[:, :, 12:] *= 1e-3
    found = []
    for length in (12, 20):
        features = (features_of(x[:, :, :length], dtype=torch.float32) for x in (q, k))
        found.append(whole(feature_queries(*features, lists[length], visible=True), length)[:, :, :12])
    torch.testing.assert_close(*found)
    assert (found[0].sum(-1) > 0.99).any()
