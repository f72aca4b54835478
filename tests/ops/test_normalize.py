import itertools

import pytest
import torch

from megasparse.ops.normalize import layer_norm, unit_keys, unit_vectors
from tests.helpers import definitions
from tests.helpers.cases import together
from tests.helpers.operators import DEVICE

BARS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def results(function, q, dtype):
    """Return the keys, and the gradients toward the keys and toward both outputs."""
    x = q.to(DEVICE, dtype).transpose(1, 2).requires_grad_()
    generator = torch.Generator().manual_seed(3)
    query, keys = function(x)
    assert torch.equal(query, x)
    grads = [torch.randn(x.shape, generator=generator).to(DEVICE, dtype) for _ in range(2)]
    [of_keys] = torch.autograd.grad(keys, x, grads[1], retain_graph=True)
    torch.autograd.backward([query * 1, keys], grads)
    return keys.detach().double(), of_keys.double(), x.grad.double()


@pytest.mark.usefixtures("implementation")
def test_unit_keys_are_the_definition():
    for shape, dtype in itertools.product([(2, 70, 3, 24), (1, 0, 2, 8)], BARS):
        q = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        exact = results(definitions.unit_keys, q, torch.float64)
        torch.testing.assert_close(results(unit_keys, q, dtype), exact, rtol=BARS[dtype], atol=BARS[dtype])


@pytest.mark.usefixtures("implementation")
def test_a_zero_vector_stays_zero_and_has_a_finite_gradient():
    q = torch.zeros(1, 2, 1, 16)
    q[0, 1] = 1e-20
    keys, _, grad = results(unit_keys, q, torch.float32)
    assert (keys[:, :, 0] == 0).all() and torch.isfinite(grad).all()
    torch.testing.assert_close(keys[:, :, 1], torch.full((1, 1, 16), 1e-8, dtype=torch.float64, device=DEVICE))


@pytest.mark.usefixtures("implementation")
@together("dtype", BARS)
def test_unit_vectors_and_gradients_equal_torch_and_a_zero_vector_has_none(dtype):
    x = torch.randn(2, 3, 9, 24, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    x[0, 1, 4] = 0
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    out, exact = unit_vectors(mine), torch.nn.functional.normalize(theirs, dim=-1)
    assert out.dtype == torch.float32 and unit_vectors(x, torch.float16).dtype == torch.float16
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    [ours] = torch.autograd.grad(out, mine, grad)
    [expected] = torch.autograd.grad(exact, theirs, grad.double())
    assert (ours[0, 1, 4] == 0).all()
    expected[0, 1, 4] = 0  # torch's is that of a short vector
    torch.testing.assert_close(ours.double(), expected, rtol=BARS[dtype], atol=BARS[dtype])


def norm_results(function, shape, out, exact, biased):
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
@together("shape,out", [((2, 70, 24), torch.float32), ((2, 70, 24), torch.bfloat16), ((1, 1, 1), torch.float32)])
@pytest.mark.parametrize("biased", [True, False], ids=["layer", "rms"])
def test_norms_are_the_definition(shape, out, biased):
    bar = {torch.float32: 2e-5, torch.bfloat16: 2**-6}[out]
    exact = norm_results(definitions.layer_norm, shape, out, exact=True, biased=biased)
    for a, b in zip(norm_results(layer_norm, shape, out, exact=False, biased=biased), exact, strict=True):
        torch.testing.assert_close(a, b, rtol=bar, atol=bar * b.abs().max().clamp_min(1).item())


@pytest.mark.usefixtures("implementation")
def test_a_norm_of_an_empty_batch_has_weights_without_gradient():
    weight, bias = (torch.ones(8, device=DEVICE, requires_grad=True) for _ in range(2))
    layer_norm(torch.ones(2, 0, 8, device=DEVICE), weight, bias, 1e-5).sum().backward()
    assert (weight.grad == 0).all() and (bias.grad == 0).all()
