"""The scores of tokens: torch's operators and the kernels, in the interpreter, against the definition in float64."""

import pytest
import torch

from megasparse.ops.cross_entropy import token_scores
from tests.helpers.definitions import token_scores as defined
from tests.helpers.kernels import DEVICE

BARS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def random_logits(count, width, dtype, size=3.0):
    generator = torch.Generator().manual_seed(count + width)
    whole = (size * torch.randn(count, width + 3, generator=generator)).to(DEVICE, dtype)
    targets = torch.randint(0, width, (count,), generator=generator).to(DEVICE)
    logits = whole[:, :width]  # rows further apart than they are long
    targets[::2] = logits[::2].argmax(-1)
    return logits, targets


def results(score, logits, targets, smoothing):
    leaf = logits.detach().requires_grad_()
    out = score(leaf, targets, smoothing)
    toward = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return out.detach(), *torch.autograd.grad(out, leaf, toward)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    "count,width,dtype", [(1, 2, torch.float32), (5, 258, torch.bfloat16), (3, 9000, torch.float16)]
)
def test_scores_and_gradient_are_those_of_the_definition(count, width, dtype, smoothing):
    logits, targets = random_logits(count, width, dtype)
    out, slope = results(token_scores, logits, targets, smoothing)
    exact, exact_slope = results(defined, logits.double(), targets, smoothing)
    assert out.dtype == torch.float32 and slope.dtype == dtype and out.shape == (count, 3 if smoothing else 2)
    assert (out[:, 1] == exact[:, 1]).all() and (out[::2, 1] == 1).all()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert (slope - exact_slope).norm() <= BARS[dtype] * exact_slope.norm()


@pytest.mark.usefixtures("implementation")
def test_of_equal_logits_the_first_is_the_likeliest():
    scores = token_scores(torch.zeros(3, 5000, device=DEVICE), torch.tensor([0, 1, 4999], device=DEVICE))
    assert scores[:, 1].tolist() == [1.0, 0.0, 0.0]


def test_large_logits_and_logits_of_minus_infinity_stay_finite(monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")
    logits, targets = random_logits(4, 5000, torch.float32, size=1e6)
    logits[:, :4096] = -torch.inf
    targets = torch.full_like(targets, 4999)
    out, slope = results(token_scores, logits, targets, 0.0)
    assert torch.isfinite(out).all() and torch.isfinite(slope).all()
    torch.testing.assert_close(out.double(), results(defined, logits.double(), targets, 0.0)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.usefixtures("implementation")
def test_a_token_without_a_target_has_scores_and_a_gradient_of_zero(smoothing):
    """The kernels read no logit for it: the row before the first one is NaN."""
    memory = torch.full((400,), torch.nan, device=DEVICE)
    logits = memory[200:].view(4, 50).copy_(torch.linspace(-1, 1, 200).view(4, 50))
    targets = torch.tensor([-100, 3, 49, -100], device=DEVICE)
    out, slope = results(token_scores, logits, targets, smoothing)
    assert (out[[0, 3]] == 0).all() and (slope[[0, 3]] == 0).all()
    exact = results(token_scores, logits[1:3], targets[1:3], smoothing)[0]
    torch.testing.assert_close(out[1:3], exact)
