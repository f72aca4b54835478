"""Attention utility from a sample of queries and keys, against the definition and its own expectation, in float64."""

import pytest
import torch

import megasparse.ops.attention_utility.blockwise as blockwise
from megasparse.ops.attention_utility import (
    Draws,
    Queries,
    draw_keys,
    sampled_keys,
    sampled_normalizer,
    sampled_queries,
)
from megasparse.ops.attention_utility.reference import utilities

LENGTH, BUCKETS, SCALE = 60, 5, 0.7
VISIBLE = pytest.mark.parametrize("visible", [False, True])


def problem(seed=0):
    """q, k (2, 2, L, 6), and in which buckets each of them is, (2, 2, L, N)."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 2, 2, LENGTH, 6, generator=generator, dtype=torch.float64)
    return q, k, *torch.randint(0, 2, (2, 2, 2, LENGTH, BUCKETS), generator=generator).double()


def attention_of(q, k, visible):
    kernel = torch.exp(SCALE * q @ k.mT)
    kernel = kernel.tril() if visible else kernel
    return kernel / kernel.sum(-1, keepdim=True)


def sample_of(q, count=13):
    tokens = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1))[:count]
    return Queries(q[:, :, tokens], tokens)


def uniform(count, seed):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@VISIBLE
def test_of_all_keys_the_utilities_are_the_definition(visible, monkeypatch):
    """Queries: their own. Keys: what they get from the sampled queries."""
    monkeypatch.setattr(blockwise, "_CPU_TILE_ELEMENTS", 400)
    q, k, in_query, in_key = problem()
    queries, rule = sample_of(q), {"scale": SCALE, "visible": visible}
    order = torch.arange(LENGTH).flip(0)
    every = Draws(k[:, :, order], order, torch.zeros(LENGTH))
    expected, _ = utilities(torch.exp(SCALE * q @ k.mT), in_query, in_key, visible)
    (tile,) = sampled_queries(queries, every, in_key[:, :, order], **rule)
    torch.testing.assert_close(tile.utility, expected[:, :, queries.tokens], rtol=1e-6, atol=1e-9)
    part = attention_of(q, k, visible)[:, :, queries.tokens].mT @ in_query[:, :, queries.tokens]
    total = part.sum(-1, keepdim=True)
    normalizer = sampled_normalizer(queries, every, **rule)
    tiles = list(sampled_keys(queries, k, torch.arange(LENGTH), normalizer, in_query[:, :, queries.tokens], **rule))
    assert len(tiles) > 1
    found = torch.cat([tile.utility for tile in tiles], dim=2)
    torch.testing.assert_close(found, torch.where(total > 0, part / total, 0.0), rtol=1e-6, atol=1e-9)


@VISIBLE
def test_sums_over_the_draws_are_unbiased(visible):
    """Σ_draws f(j)/c_j has the expectation Σ_j f(j): here f(j) = A_ij, of each bucket and of all keys."""
    q, k, _, in_key = problem()
    queries = sample_of(q)
    attention = attention_of(q, k, visible)[:, :, queries.tokens]
    exact, found = attention @ in_key, []
    for seed in range(300):
        draws = draw_keys(queries, k, uniform(12, seed), scale=SCALE, visible=visible)
        index = draws.tokens.unsqueeze(-2).expand(-1, -1, attention.shape[2], -1)
        inside = in_key.gather(2, draws.tokens.unsqueeze(-1).expand(-1, -1, -1, BUCKETS))
        found.append((attention.gather(-1, index) / draws.ln_count.double().exp().unsqueeze(-2)) @ inside)
    estimates = torch.stack(found)
    error = estimates.std(0) / len(found) ** 0.5
    assert ((estimates.mean(0) - exact).abs() <= 5 * error + 1e-6).all()
    assert error.max() < 0.2 * exact.max()


def test_a_key_that_gets_much_attention_is_drawn_as_often_as_expected():
    q, k, *_ = problem()
    q[..., 0], k[..., 0], k[:, :, 17, 0] = 9.0, 0.0, 4.0  # all queries attend to key 17
    draws = draw_keys(sample_of(q), k, uniform(40, 0), scale=1.0, visible=False)
    seventeen = draws.tokens == 17
    assert ((seventeen.sum(-1) - 20).abs() <= 2).all()
    torch.testing.assert_close(draws.ln_count[seventeen].exp(), torch.full((), 20 + 20 / 60).expand(seventeen.sum()))
    torch.testing.assert_close(draws.k, k.gather(2, draws.tokens.unsqueeze(-1).expand(-1, -1, -1, 6)))
    again = draw_keys(sample_of(q), k, uniform(40, 0), scale=1.0, visible=False)
    assert torch.equal(draws.tokens, again.tokens)


def test_more_draws_come_nearer_to_the_exact_utilities():
    q, k, in_query, in_key = problem()
    queries, rule, errors = sample_of(q), {"scale": SCALE, "visible": False}, []
    exact, _ = utilities(torch.exp(SCALE * q @ k.mT), in_query, in_key, False)
    for count in (8, 128, 2048):
        draws = draw_keys(queries, k, uniform(count, 0), **rule)
        inside = in_key.gather(2, draws.tokens.unsqueeze(-1).expand(-1, -1, -1, BUCKETS))
        (tile,) = sampled_queries(queries, draws, inside, **rule)
        errors.append((tile.utility - exact[:, :, queries.tokens]).abs().mean())
    assert errors[0] > 3 * errors[1] > 9 * errors[2]


def test_a_query_that_sees_no_drawn_key_teaches_and_tells_nothing():
    q, k, in_query, in_key = problem()
    queries, rule = Queries(q[:, :, [2, 40]], torch.tensor([2, 40])), {"scale": SCALE, "visible": True}
    draws = Draws(k[:, :, 30:35], torch.arange(30, 35), torch.zeros(5))
    (tile,) = sampled_queries(queries, draws, in_key[:, :, 30:35], **rule)
    assert (tile.utility[:, :, 0] == 0).all() and (tile.utility[:, :, 1].sum(-1) > 0.99).all()
    normalizer = sampled_normalizer(queries, draws, **rule)
    (tile,) = sampled_keys(queries, k[:, :, :3], torch.arange(3), normalizer, in_query[:, :, [2, 40]], **rule)
    expected = in_query[:, :, 40] / in_query[:, :, 40].sum(-1, keepdim=True)  # of the other query alone
    torch.testing.assert_close(tile.utility, expected.unsqueeze(2).expand(-1, -1, 3, -1))
