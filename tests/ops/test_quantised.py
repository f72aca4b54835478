"""Quantised matrices against their dequantised values, and their bytes against the tensors that store them."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megasparse.errors import UserError
from megasparse.ops.quantised import Quantised, quantise
from tests.helpers.commands import refusal

ERROR = {"nf4": 0.1, "int8": 0.01}
"""Largest relative error of normal weights."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ERROR)
def test_a_layer_computes_with_the_dequantised_matrix_and_keeps_only_codes(kind, dtype):
    pytest.importorskip("bitsandbytes")
    generator, saved = torch.Generator().manual_seed(0), []
    weight, x = (torch.randn(48, 130, generator=generator), torch.randn(2, 7, 130, generator=generator).to(dtype))
    layer = nn.Linear(130, 48, bias=False)
    layer.weight = nn.Parameter(quantise(weight, kind, torch.float32), requires_grad=False)
    layer.to(dtype)
    plain = layer.weight.dequantise()
    assert plain.dtype == dtype and (plain.float() - weight).norm() < ERROR[kind] * weight.norm()
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = layer(ours)
    expected = F.linear(theirs, plain)
    assert torch.equal(out, expected) and {*map(type, saved)} == {Quantised}
    (out.sum() + expected.sum()).backward()
    assert torch.equal(ours.grad, theirs.grad)
    scales = layer.weight.scales
    parts = (
        [layer.weight.codes, scales] if kind == "int8" else [layer.weight.codes, scales.absmax, scales.state2.absmax]
    )
    assert layer.weight.stored_bytes == sum(part.numel() * part.element_size() for part in parts)
    assert quantise(weight.to("meta"), kind, dtype).stored_bytes == layer.weight.stored_bytes


def test_a_missing_library_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    message = refusal(lambda: quantise(torch.ones(2, 2), "nf4", torch.float32), UserError)
    assert message.startswith("lora.quantized: bitsandbytes is not installed. Install it: ")
