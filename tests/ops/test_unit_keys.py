import pytest
import torch

from megasparse.ops.normalize import unit_keys, unit_vectors
from tests.helpers.definitions import unit_keys as defined
from tests.helpers.kernels import DEVICE

BARS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def results(function, q, dtype):
    """The keys, and the gradient where both outputs have one."""
    x = q.to(DEVICE, dtype).transpose(1, 2).requires_grad_()
    generator = torch.Generator().manual_seed(3)
    own, keys = function(x)
    assert torch.equal(own, x)
    grads = [torch.randn(x.shape, generator=generator).to(DEVICE, dtype) for _ in range(2)]
    torch.autograd.backward([own * 1, keys], grads)
    return keys.detach().double(), x.grad.double()


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", list(BARS), ids=str)
@pytest.mark.parametrize("shape", [(2, 70, 3, 24), (1, 5, 1, 64), (1, 0, 2, 8)])
def test_keys_and_gradients_are_the_definitions(shape, dtype):
    q = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = results(defined, q, torch.float64)
    torch.testing.assert_close(results(unit_keys, q, dtype), exact, rtol=BARS[dtype], atol=BARS[dtype])


@pytest.mark.usefixtures("implementation")
def test_a_zero_vector_stays_zero_and_has_a_finite_gradient():
    q = torch.zeros(1, 2, 1, 16)
    q[0, 1] = 1e-20
    keys, grad = results(unit_keys, q, torch.float32)
    assert (keys[:, :, 0] == 0).all() and torch.isfinite(grad).all()
    torch.testing.assert_close(keys[:, :, 1], torch.full((1, 1, 16), 1e-8, dtype=torch.float64, device=DEVICE))


@pytest.mark.usefixtures("implementation")
def test_keys_alone_have_a_gradient():
    q = torch.randn(1, 2, 6, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = []
    for function, dtype in ((unit_keys, torch.float32), (defined, torch.float64)):
        x = q.to(dtype).requires_grad_()
        found.append(torch.autograd.grad(function(x)[1][..., 0].sum(), x)[0].double())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", list(BARS), ids=str)
def test_unit_vectors_and_their_gradients_are_torchs_and_a_zero_vector_has_none(dtype):
    x = torch.randn(2, 3, 9, 24, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    x[0, 1, 4] = 0
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    out, exact = unit_vectors(mine), torch.nn.functional.normalize(theirs, dim=-1)
    assert out.dtype == torch.float32 and unit_vectors(x, torch.float16).dtype == torch.float16
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    [ours] = torch.autograd.grad(out, mine, grad)
    [wanted] = torch.autograd.grad(exact, theirs, grad.double())
    assert (ours[0, 1, 4] == 0).all()
    wanted[0, 1, 4] = 0  # torch's is that of a short vector
    torch.testing.assert_close(ours.double(), wanted, rtol=BARS[dtype], atol=BARS[dtype])
