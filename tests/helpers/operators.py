"""Attention operators in tests: random inputs, gradients of both outputs, and the bars of every dtype."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Kernels run on the GPU where there is one, else on the CPU, in Triton's interpreter."""
BARS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 3e-2), torch.float16: (1e-2, 3e-2)}
"""Relative errors of outputs and of gradients that a dtype may have."""
NAMES = ["out", "lse", "dq", "dk", "dv"]


def random_heads(queries, keys=None, rows=(2, 2), dim=16, dtype=torch.float64, device="cpu", seed=0):
    """Return q, k, v (*rows, L, D); the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [queries, *[keys or queries] * 2]
    return [torch.randn(*rows, n, dim, generator=generator, dtype=torch.float64).to(device, dtype) for n in lengths]


def random_masks(length, batch=2, device="cpu"):
    """Return key_mask and segments (batch, L)."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(batch, length, generator=generator) > 0.3
    documents = torch.randint(0, 3, (batch, length), generator=generator).sort(-1).values
    return mask.to(device), documents.to(device)


def as_views(heads):
    """The same numbers, each token's heads next to each other in memory."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads]


def gradients(attention, heads):
    """Return out and lse = attention(q, k, v), and the gradients of q, k and v toward random ones of both."""
    q, k, v = (x.detach().clone().requires_grad_() for x in heads)
    out, lse = attention(q, k, v)
    generator = torch.Generator().manual_seed(2)
    out_grad, lse_grad = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, lse))
    loss = (out * out_grad.to(out)).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * lse_grad.to(lse)).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, [q, k, v])


def assert_equal(ours, exact, bar=1e-10):
    ours, exact = (dict(zip(NAMES, values, strict=True)) for values in (ours, exact))
    torch.testing.assert_close(ours, exact, rtol=bar, atol=bar)


def assert_same_bits(ours, other):
    assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


def assert_within_bars(ours, exact, dtype, floor=0.0):
    """Each result is within its dtype's bar of the exact one, by norms; floor: the rounding error of a number."""
    assert ours[1].dtype == torch.float32 and all(x.dtype == dtype for x in (ours[0], *ours[2:]))
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        seen = b > -torch.inf
        assert torch.equal(a == -torch.inf, ~seen), name
        a, b = a[seen].double(), b[seen]
        bar = BARS[dtype][name.startswith("d")]
        assert (a - b).norm() <= bar * b.norm() + floor * b.numel() ** 0.5, (name, (a - b).norm() / b.norm())


def assert_gradients_of_one_output_alone(attention, defined, heads):
    """The other output gets no gradient at all, and this one an expanded one."""
    for of in (0, 1):
        found = []
        for function, dtype in ((attention, torch.float32), (defined, torch.float64)):
            inputs = [x.to(dtype).detach().requires_grad_() for x in heads]
            result = function(*inputs)[of]
            result.masked_fill(result == -torch.inf, 0.0).sum().backward()
            found.append([torch.zeros_like(x) if x.grad is None else x.grad for x in inputs])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


_SIZES = re.compile(r"_?[A-Z_]*ELEMENTS|_TILE|_BLOCK_PAIRS|_BYTES|_PARTS|_PROJECTED")


@contextmanager
def smaller_blocks(part: float) -> Iterator[None]:
    """Multiply the block sizes of all imported operators and mechanisms, their constants, by `part`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith(("megasparse.ops", "megasparse.attention")) and module is not None:
                for constant, size in vars(module).copy().items():
                    if _SIZES.fullmatch(constant) and isinstance(size, int):
                        patch.setattr(module, constant, max(1, round(size * part)))
        yield
