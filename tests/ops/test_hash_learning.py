"""Rows of scores of all buckets against their definitions in float64."""

import pytest
import torch

from megasparse.ops.hash_learning import divergence, ranks, unit_sum
from tests.helpers.kernels import DEVICE


def random_rows(shape=(2, 3, 21, 40), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 5 * torch.randn(shape, generator=generator).to(DEVICE)


def close(found, exact):
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("implementation")
def test_rows_are_divided_by_their_sums_and_a_row_of_zeros_stays():
    x = random_rows().relu()
    x[0, 1, 2] = 0
    exact = x.double() / x.double().sum(-1, keepdim=True).clamp_min(1e-30)
    close(unit_sum(x.clone()), exact)


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
    found, met, information, error = divergence(scores.clone(), utility, codes, 3.0, learn)
    close(found, total.detach())
    close(met, kept)
    close(information, 3.0 * torch.xlogy(utility.double(), utility.double()).sum())
    assert (error is not None) == learn
    if error is not None:
        close(error, wanted)
