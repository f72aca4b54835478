import torch
import torch.nn.functional as F

from megasparse.ops.tiled import tiled
from tests.helpers.peak_memory import PeakMemory


def mlp(x, shift, up, down):
    return F.gelu((x + shift[..., None]) @ up) @ down


def inputs(length, dtype=torch.float64, width=6, hidden=10):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, width), (2, length), (width, hidden), (hidden, width)]
    x, shift, up, down = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return x.requires_grad_(), shift, up.requires_grad_(), down.requires_grad_()


def test_tiles_do_not_change_value_or_gradients():
    for tiles in (1, 3, 7, 50):
        x, shift, up, down = inputs(7)
        expected, result = mlp(x, shift, up, down), tiled(mlp, (x, shift), (up, down), tiles)
        torch.testing.assert_close(result, expected)
        grad = torch.randn_like(expected)
        torch.testing.assert_close(*(torch.autograd.grad(out, [x, up, down], grad) for out in (result, expected)))


def test_a_weight_gets_one_gradient_summed_in_fp32():
    x, shift, up, down = inputs(64, dtype=torch.bfloat16)
    calls = []
    up.register_hook(lambda g: calls.append(g.dtype))
    tiled(mlp, (x, shift), (up, down), 8).sum().backward()
    assert calls == [torch.bfloat16]
    (exact,) = torch.autograd.grad(mlp(x.double(), shift.double(), up.double(), down.double()).sum(), [down])
    assert (down.grad - exact).norm() / exact.norm() < 1e-2


def test_frozen_weights_and_inputs_get_no_gradient():
    x, shift, up, down = inputs(8)
    tiled(mlp, (x.detach(), shift), (up.detach(), down), 4).sum().backward()
    assert up.grad is None and x.grad is None and down.grad is not None


def peak(tiles):
    x, shift, up, down = inputs(512, dtype=torch.float32, width=8, hidden=256)
    with PeakMemory() as memory:
        tiled(mlp, (x, shift), (up, down), tiles).sum().backward()
    return memory.peak


def test_the_peak_falls_with_the_tiles_backward_included():
    whole, four, sixteen = peak(1), peak(4), peak(16)
    assert four < 0.4 * whole and sixteen < 0.45 * four
