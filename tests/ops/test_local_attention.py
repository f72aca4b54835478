import itertools

import pytest
import torch

import megasparse.ops.local_attention as module
from megasparse.ops.local_attention import (
    LocalAttentionSpec,
    RelativeVectors,
    distances,
    relative_local_attention,
)
from tests.helpers.definitions import relative_local_attention as reference
from tests.helpers.operators import BARS, DEVICE


def random_inputs(length, chunk, causal, width=6, dtype=torch.float64, batch=2, heads=2, device="cpu"):
    """Return q, k, v, which are views of heads that lie side by side, r, u, w."""
    generator = torch.Generator().manual_seed(length + 7 * chunk + width)
    count = len(distances(chunk, causal))
    shapes = [(batch, length, heads, width)] * 3 + [(heads, count, width), (heads, width), (heads, width)]
    made = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes)
    q, k, v, *relative = made
    return [*(x.transpose(1, 2) for x in (q, k, v)), *relative]


def gradients(attend, inputs, chunk, causal, scale, key_mask=None, segments=None):
    """The output, and the gradients of all inputs toward one that is rounded to bf16, so that all dtypes share it."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    relative = RelativeVectors(*leaves[3:])
    out = attend(*leaves[:3], relative, LocalAttentionSpec(chunk, causal, scale), key_mask, segments)
    toward = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, toward)]


@pytest.mark.parametrize("length,chunk,causal", [(3, 1, True), (29, 4, True), (29, 4, False), (9, 16, False)])
def test_blocks_are_the_definition(length, chunk, causal, monkeypatch):
    monkeypatch.setattr(module, "_SCORE_ELEMENTS", 300)  # several tiles
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(2, length, generator=generator) > 0.3
    documents = torch.randint(0, 3, (2, length), generator=generator)
    inputs = random_inputs(length, chunk, causal)
    for key_mask, segments in itertools.product([None, mask], [None, documents.sort(-1).values, documents]):
        rule = dict(causal=causal, scale=0.7, key_mask=key_mask, segments=segments)
        results = [gradients(attend, inputs, chunk, **rule) for attend in (relative_local_attention, reference)]
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
        if key_mask is not None:
            assert (results[0][0].transpose(1, 2)[~mask] == 0).all()


def test_each_pair_takes_the_vector_of_its_distance():
    """Keys, queries and biases are zero but for one number, so that the logits are r itself."""
    length, chunk = 12, 4
    for causal in (True, False):
        steps = torch.tensor(distances(chunk, causal), dtype=torch.float64)
        r = torch.zeros(1, len(steps), 2, dtype=torch.float64)
        r[0, :, 0] = steps
        zero = torch.zeros(1, 1, length, 2, dtype=torch.float64)
        u, w = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[1.0, 0.0]], dtype=torch.float64)
        v = torch.eye(length, dtype=torch.float64)[None, None]
        out = relative_local_attention(zero, zero, v, RelativeVectors(r, u, w), LocalAttentionSpec(chunk, causal, 1.0))[
            0, 0
        ]
        for i, j in itertools.product(range(length), repeat=2):
            apart = i // chunk - j // chunk
            if (j <= i and apart <= 1) if causal else abs(apart) <= 1:
                torch.testing.assert_close((out[i, j] / out[i, i]).log().item(), float(i - j))
            else:
                assert out[i, j] == 0


def test_finite_in_hard_cases():
    for causal, factor in itertools.product([True, False], [0.0, 1e4]):
        inputs = [x * factor for x in random_inputs(20, 4, causal, 8, torch.float32, 1, 1, DEVICE)]
        for x in gradients(relative_local_attention, inputs, 4, causal=causal, scale=0.5):
            assert torch.isfinite(x).all()


@pytest.mark.parametrize("causal,dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_low_precision_is_within_its_bar(causal, dtype):
    inputs, rule = random_inputs(100, 16, causal, dtype=dtype), dict(causal=causal, scale=0.4)
    ours = gradients(relative_local_attention, inputs, 16, **rule)
    exact = gradients(reference, [x.double() for x in inputs], 16, **rule)
    assert ours[0].dtype == dtype
    for i, (a, b) in enumerate(zip(ours, exact, strict=True)):
        assert (a - b).norm() < BARS[dtype][i > 0] * b.norm()


def test_a_sequence_of_padding_gives_zeros():
    inputs = random_inputs(5, 2, True, 8, torch.float32, 1, 1, DEVICE)
    mask = torch.zeros(1, 5, dtype=torch.bool, device=DEVICE)
    for x in gradients(relative_local_attention, inputs, 2, causal=True, scale=1.0, key_mask=mask):
        assert (x == 0).all()
