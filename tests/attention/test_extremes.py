"""Outputs and gradients are finite wherever the definition is: zeros, equal vectors, huge ones, one token, bf16."""

import pytest
import torch

from tests.helpers.models import Single, all_names, causal_names

CASES = [(name, True) for name in causal_names()] + [(name, False) for name in all_names()]
EVERY = pytest.mark.parametrize("name,causal", CASES, ids=[f"{n}, {'causal' if c else 'both'}" for n, c in CASES])


def check_finite(single, inputs, **arguments):
    leaves = [t.clone().requires_grad_() for t in inputs]
    result = single(*leaves, training=True, **arguments)
    loss = (result.out.float() ** 2).sum()
    if result.auxiliary_loss is not None:
        loss = loss + result.auxiliary_loss
    loss.backward()
    assert result.out.isfinite().all() and loss.isfinite()
    for leaf in leaves:
        assert leaf.grad is None or leaf.grad.isfinite().all()
    for parameter in single.mechanism.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()
    return result.out


@EVERY
def test_zero_vectors(name, causal):
    single = Single(name, causal)
    check_finite(single, [torch.zeros_like(t) for t in single.inputs(40)])


@EVERY
def test_equal_vectors_all_in_one_bucket(name, causal):
    """Queries are keys, and all tokens are the same; what is seen has one value, so the output does not vary."""
    single = Single(name, causal)
    x, q, _, v = (t[..., :1, :].expand(t.shape).clone() for t in single.inputs(40))
    check_finite(single, [x, q, q, v])


@EVERY
@pytest.mark.parametrize("scale", [1e4, 1e-8])
def test_huge_and_tiny_inputs(name, causal, scale):
    single = Single(name, causal)
    check_finite(single, [t * scale for t in single.inputs(40)])


@EVERY
def test_one_token_and_one_of_padding(name, causal):
    single = Single(name, causal)
    out = check_finite(single, single.inputs(1))
    assert out.shape == (2, 2, 1, 16)
    mask = torch.tensor([[True, True], [True, False]])
    out = check_finite(single, single.inputs(2), key_mask=mask)
    assert (out[1, :, 1] == 0).all()
    out = check_finite(single, single.inputs(3), key_mask=torch.zeros(2, 3, dtype=torch.bool))  # nothing is real
    assert (out == 0).all()


@EVERY
def test_bfloat16(name, causal):
    single = Single(name, causal)
    single.mechanism.to(torch.bfloat16)
    out = check_finite(single, single.inputs(40, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
