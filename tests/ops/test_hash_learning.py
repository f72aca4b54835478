"""Rows of scores of all buckets, and attention utility from a sample, against their definitions in float64."""

import pytest
import torch

import megasparse.ops.hash_learning as hash_learning
from megasparse.ops.hash_learning import Draws, divergence, draw_keys, ranks, sampled_keys, sampled_queries, unit_sum
from tests.helpers.definitions import utilities
from tests.helpers.operators import DEVICE

LENGTH, BUCKETS, SCALE = 60, 5, 0.7


def random_rows(shape=(2, 3, 21, 40), seed=0):
    return 5 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(found, exact):
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("implementation")
def test_rows_are_divided_by_their_sums_and_a_row_of_zeros_stays():
    x = random_rows().relu()
    x[0, 1, 2] = 0
    close(unit_sum(x.clone()), x.double() / x.double().sum(-1, keepdim=True).clamp_min(1e-30))


@pytest.mark.usefixtures("implementation")
def test_ranks_order_tokens_by_probability_and_equals_by_number():
    scores = random_rows()
    scores[:, :, 9] = scores[:, :, 4]
    scores[0, 0, :8, 3] = 500.0  # all of the probability, in several tokens
    found = ranks(scores, 100)
    assert torch.equal(found & 0xFFFFFFFF, torch.arange(100, 121, device=DEVICE).expand_as(found))
    order = found.argsort(-1)
    exact = scores.double().softmax(-1).transpose(-1, -2).gather(-1, order)
    assert (exact[..., 1:] <= exact[..., :-1] * (1 + 1e-5)).all()
    assert torch.equal(order[0, 0, 3, :8], torch.arange(8, device=DEVICE))
    assert (found[1, ..., 4] < found[1, ..., 9]).all()


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("learn", [False, True])
def test_the_divergence_and_its_gradient_are_the_definitions(learn):
    scores, utility = random_rows(), random_rows(seed=1).relu().softmax(-1)
    utility[0, 0, 0], utility[1, 2, 3] = 0, torch.eye(40)[7]
    codes = torch.arange(2 * 3 * 21, device=DEVICE).view(2, 3, 21).remainder(40).to(torch.int16)
    exact = scores.double().requires_grad_()
    logarithm = exact.log_softmax(-1)
    total = 3.0 * (torch.xlogy(utility.double(), utility.double()) - utility.double() * logarithm).sum()
    kept = 3.0 * utility.double().gather(-1, codes.long().unsqueeze(-1)).sum()
    [wanted] = torch.autograd.grad(total, exact)
    sums, error = divergence(scores.clone(), utility, codes, 3.0, learn)
    close(sums, torch.stack([total.detach(), kept, 3.0 * torch.xlogy(utility.double(), utility.double()).sum()]))
    assert (error is not None) == learn
    if error is not None:
        close(error, wanted)


def problem(seed=0):
    """q, k (2, 2, L, 6), and in which buckets each of them is, (2, 2, L, N)."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 2, 2, LENGTH, 6, generator=generator, dtype=torch.float64)
    return q, k, *torch.randint(0, 2, (2, 2, 2, LENGTH, BUCKETS), generator=generator).double()


def attention_of(q, k):
    kernel = torch.exp(SCALE * q @ k.mT)
    return kernel / kernel.sum(-1, keepdim=True)


def sample_of(q, count=13):
    tokens = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1))[:count]
    return q[:, :, tokens], tokens


def points(count, seed):
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (torch.arange(count) + uniform) / count


def test_utilities_of_all_keys_equal_the_definition(monkeypatch):
    """Queries: their own attention. Keys: attention that they receive from the sampled queries."""
    monkeypatch.setattr(hash_learning, "_CPU_TILE_ELEMENTS", 400)
    q, k, in_query, in_key = problem()
    queries, tokens = sample_of(q)
    order = torch.arange(LENGTH).flip(0)
    every = Draws(k[:, :, order], order, torch.zeros(LENGTH))
    expected, _ = utilities(torch.exp(SCALE * q @ k.mT), in_query, in_key)
    utility, normalizer = sampled_queries(queries, every, in_key[:, :, order], scale=SCALE)
    torch.testing.assert_close(utility, expected[:, :, tokens], rtol=1e-6, atol=1e-9)
    part = attention_of(q, k)[:, :, tokens].mT @ in_query[:, :, tokens]
    total = part.sum(-1, keepdim=True)
    tiles = list(sampled_keys(queries, k, normalizer, in_query[:, :, tokens], scale=SCALE))
    assert len(tiles) > 1
    found = torch.cat([utility for _, utility in tiles], dim=2)
    torch.testing.assert_close(found, torch.where(total > 0, part / total, 0.0), rtol=1e-6, atol=1e-9)


def test_random_features_estimate_the_kernel():
    """Lemma 1 of Choromanski et al. 2020: the mean of φ(q)·φ(k) over draws of the rows is exp(scale·q·k)."""
    q, k, *_ = problem()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 2, 50, 6, generator=generator, dtype=torch.float64)
    draws = torch.stack([hash_learning._products(q / 2, k / 2, SCALE, features).exp() for features in rows])
    error = draws.std(0) / len(draws) ** 0.5
    scores = (draws.mean(0) - torch.exp(SCALE / 4 * q @ k.mT)) / error
    assert 0.5 < scores.square().mean().sqrt() < 1.5


def test_sums_over_the_draws_are_unbiased():
    """Σ_draws f(j)/c_j has the expectation Σ_j f(j): here f(j) = A_ij, of each bucket and of all keys."""
    q, k, _, in_key = problem()
    queries, tokens = sample_of(q)
    attention = attention_of(q, k)[:, :, tokens]
    exact, found = attention @ in_key, []
    for seed in range(300):
        draws = draw_keys(queries, k, points(12, seed), scale=SCALE)
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
    queries, _ = sample_of(q)
    draws = draw_keys(queries, k, points(40, 0), scale=1.0)
    seventeen = draws.tokens == 17
    assert ((seventeen.sum(-1) - 20).abs() <= 2).all()
    torch.testing.assert_close(draws.ln_count[seventeen].exp(), torch.full((), 20 + 20 / 60).expand(seventeen.sum()))
    torch.testing.assert_close(draws.k, k.gather(2, draws.tokens.unsqueeze(-1).expand(-1, -1, -1, 6)))
    assert torch.equal(draws.tokens, draw_keys(queries, k, points(40, 0), scale=1.0).tokens)
