"""Attention under torch.autocast: operators compute as they do without it, forward and backward."""

import torch

from megasparse.attention.contract import AttentionContext
from megasparse.attention.heads import Padding
from megasparse.ops.random import RngContext
from tests.helpers.comparing import gradients_of
from tests.helpers.models import EVERY, Single, layer_of

LENGTH = 37


def results(single, autocast=None, backward_inside=False):
    """A training pass's output and the gradients of all that it reads and of the mechanism's own weights, in fp32.

    autocast: the dtype of q, k, v too, otherwise fp32. The numbers are those of bf16 in any case."""
    x, *heads = single.inputs(LENGTH, dtype=torch.bfloat16)
    inputs = [x.float().requires_grad_(), *(t.to(autocast or torch.float32).requires_grad_() for t in heads)]
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        output = single(*inputs, training=True)
        gradients = gradients_of(single, output, inputs) if backward_inside else None
    return output, gradients or gradients_of(single, output, inputs)


@EVERY
def test_attention_of_bf16_heads_equals_the_same_numbers_in_fp32(name, causal):
    single = Single(name, causal)
    expected, expected_gradients = results(single)
    for backward_inside in (False, True):
        output, gradients = results(single, torch.bfloat16, backward_inside)
        assert output.out.dtype == torch.bfloat16
        close("out", output.out, expected.out)
        for key, value in gradients.items():
            assert (value is None) == (expected_gradients[key] is None), key
            if value is not None:
                close(key, value, expected_gradients[key])


def close(key, value, expected):
    difference = (value.float() - expected.float()).norm()
    assert difference <= 2e-2 * expected.norm() + 1e-6, f"{key}: {difference / expected.norm()}"


def test_a_layer_disables_autocast_only_for_its_mechanisms():
    layer, seen = layer_of("lsh"), []
    layer.mechanism("lsh").register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    layer.output.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(1, 20, 32), AttentionContext(0, RngContext.evaluation(0, 1)), Padding())
    assert seen == [False, True]
