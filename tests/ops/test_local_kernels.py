"""The kernels of local attention with relative positions, in the interpreter, against the definition in float64."""

import pytest
import torch

from megasparse.ops import local_attention_kernels
from megasparse.ops.local_attention import reference as defined
from megasparse.ops.local_attention import relative_local_attention
from tests.helpers.kernels import DEVICE
from tests.helpers.operators import BARS
from tests.ops.test_local_attention import gradients
from tests.ops.test_local_attention import random_inputs as inputs_on

NAMES = ("out", "q", "k", "v", "r", "u", "w")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")


def random_inputs(length, chunk, causal, width=24, dtype=torch.float32, batch=1, heads=1):
    return inputs_on(length, chunk, causal, width, dtype, batch, heads, DEVICE)


def check(inputs, chunk, **rule):
    """Compares with the definition; returns the kernels' results."""
    forward, backward = BARS[inputs[0].dtype]
    ours = gradients(relative_local_attention, inputs, chunk, **rule)
    exact = gradients(defined, [x.double() for x in inputs], chunk, **rule)
    for name, a, b, given in zip(NAMES, ours, exact, [inputs[0], *inputs], strict=True):
        assert a.dtype == given.dtype and a.shape == b.shape
        size = torch.maximum(b.norm(), 1e-2 * exact[3].norm())  # a lone token's gradients of q and k are 0
        assert (a - b).norm() <= (forward if name == "out" else backward) * size, name
    return ours


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length,chunk", [(1, 4), (35, 1), (70, 8), (40, 100)])
def test_forward_and_all_gradients_are_those_of_the_definition(length, chunk, causal):
    check(random_inputs(length, chunk, causal), chunk, causal=causal, scale=0.3)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_and_documents_in_any_order(causal):
    inputs = random_inputs(45, 8, causal, batch=2)
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(2, 45, generator=generator) > 0.3
    mask[1, 0] = False
    mask = mask.to(DEVICE)
    documents = torch.randint(0, 3, (2, 45), generator=generator).to(DEVICE)
    out, dq, dk, dv, *_ = check(inputs, 8, causal=causal, scale=0.3, key_mask=mask, segments=documents)
    for x in (out, dq, dk, dv):
        assert (x.transpose(1, 2)[~mask] == 0).all()
    check(inputs, 8, causal=causal, scale=0.3, segments=documents.sort(-1).values)


def test_a_sequence_of_padding_alone_gives_zeros():
    mask = torch.zeros(1, 5, dtype=torch.bool, device=DEVICE)
    for x in gradients(relative_local_attention, random_inputs(5, 2, True), 2, causal=True, scale=1.0, key_mask=mask):
        assert (x == 0).all()


def test_bf16_with_several_heads():
    check(random_inputs(40, 32, True, width=16, dtype=torch.bfloat16, heads=2), 32, causal=True, scale=0.3)


def test_parts_of_the_gradient_of_r_add_up_over_any_number_of_programs(monkeypatch):
    for length, batch, parts in ((40, 2, 1), (130, 1, 5)):  # one program for two sequences; three tiles, then two
        monkeypatch.setattr(local_attention_kernels, "_PARTS", parts)
        check(random_inputs(length, 8, True, batch=batch), 8, causal=True, scale=0.3)


@pytest.mark.kernels
@pytest.mark.parametrize("length,chunk,causal", [(1, 8, True), (17, 8, False), (100, 32, True)])
@pytest.mark.parametrize("dtype", list(BARS))
@pytest.mark.parametrize("width", [16, 24, 32, 64, 128, 256])
def test_grid(width, dtype, length, chunk, causal):
    check(random_inputs(length, chunk, causal, width, dtype), chunk, causal=causal, scale=width**-0.5)
