import pytest
import torch

from megasparse.ops.normalize import layer_norm
from tests.helpers.definitions import layer_norm as defined
from tests.helpers.kernels import DEVICE


def results(function, shape, out, exact, biased):
    """The output and the gradients of input and weight, and of a bias where there is one."""
    generator = torch.Generator().manual_seed(1)
    x = 3 + torch.randn(shape, generator=generator)
    weight, bias = (torch.randn(shape[-1], generator=generator).to(out) for _ in range(2))
    grad = torch.randn(shape, generator=generator).to(out)
    leaves = [y.to(DEVICE, torch.float64 if exact else None).requires_grad_() for y in (x, weight, bias)][: 2 + biased]
    found = function(*leaves, *[None] * (not biased), 1e-5, torch.float64 if exact else out)
    assert found.dtype == (torch.float64 if exact else out)
    found.backward(grad.to(DEVICE, found.dtype))
    return [found.detach().double(), *(leaf.grad.double() for leaf in leaves)]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 70, 24), (3, 1, 64), (1, 1, 1)])
@pytest.mark.parametrize("biased", [True, False], ids=["layer", "rms"])
def test_values_and_gradients_are_the_definitions(shape, out, biased):
    bar = {torch.float32: 2e-5, torch.bfloat16: 2**-6}[out]
    exact = results(defined, shape, out, exact=True, biased=biased)
    for a, b in zip(results(layer_norm, shape, out, exact=False, biased=biased), exact, strict=True):
        torch.testing.assert_close(a, b, rtol=bar, atol=bar * b.abs().max().clamp_min(1).item())


@pytest.mark.usefixtures("implementation")
def test_an_empty_batch_has_weights_without_gradient():
    weight, bias = (torch.ones(8, device=DEVICE, requires_grad=True) for _ in range(2))
    layer_norm(torch.ones(2, 0, 8, device=DEVICE), weight, bias, 1e-5).sum().backward()
    assert (weight.grad == 0).all() and (bias.grad == 0).all()
