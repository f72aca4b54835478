"""Outputs and gradients are finite wherever the definition is: zeros, equal vectors, huge ones, one token, bf16. What
is not finite stays in its own sequence."""

import math

import torch

from tests.helpers.models import EVERY, Single


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


def thirds_zero(*inputs):
    for t in inputs:
        t[..., ::3, :] = 0.0
    return inputs


HARD = {
    "all zero": lambda *inputs: [t * 0 for t in inputs],
    "some zero": thirds_zero,
    "equal tokens, in one bucket": lambda x, q, k, v: [t[..., :1, :].expand(t.shape) for t in (x, q, q, v)],
    "queries are keys": lambda x, q, k, v: (x, q, q, v),
    "all huge": lambda *inputs: [t * 1e4 for t in inputs],
    "all denormal in fp32": lambda *inputs: [t * 1e-40 for t in inputs],
    "queries huge, keys tiny": lambda x, q, k, v: (x, q * 1e4, k * 1e-8, v),
    "queries tiny, keys huge": lambda x, q, k, v: (x, q * 1e-8, k * 1e4, v),
}


@EVERY
def test_zero_equal_huge_and_tiny_vectors(name, causal):
    single = Single(name, causal)
    for case, change in HARD.items():
        print(case)
        check_finite(single, change(*single.inputs(40)))


@EVERY
def test_inputs_as_large_as_fp16_knows(name, causal):
    single = Single(name, causal)
    signs = [torch.sign(t) * 65504.0 for t in single.inputs(40)]
    check_finite(single, signs)
    single.mechanism.to(torch.bfloat16)
    assert check_finite(single, [t.bfloat16() for t in signs]).dtype == torch.bfloat16


@EVERY
def test_non_finite_values_stay_in_their_sequence(name, causal):
    """Outputs and gradients of the other sequence have the same bits, whatever one token of this one is."""
    single = Single(name, causal)

    def first_sequence(inputs):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = single(*leaves, training=True).out
        out[0].square().sum().backward()
        return [out[0].detach(), *(leaf.grad[0] for leaf in leaves if leaf.grad is not None)]

    clean = first_sequence(single.inputs(40))
    assert len(clean) >= 2
    for value in (math.nan, math.inf, -math.inf, 3e38):
        inputs = single.inputs(40)
        for t in inputs:
            t[1, ..., 13, :] = value
        for ours, expected in zip(first_sequence(inputs), clean, strict=True):
            assert torch.equal(ours, expected), value


@EVERY
def test_lengths_around_a_chunk_one_token_and_one_of_padding(name, causal):
    single = Single(name, causal)
    for length in (1, 7, 8, 9, 41):
        assert check_finite(single, single.inputs(length)).shape == (2, 2, length, 16)
    mask = torch.tensor([[True, True], [True, False]])
    out = check_finite(single, single.inputs(2), key_mask=mask)
    assert (out[1, :, 1] == 0).all()
    out = check_finite(single, single.inputs(3), key_mask=torch.zeros(2, 3, dtype=torch.bool))  # nothing is real
    assert (out == 0).all()
