"""Definitions, blockwise torch and Triton kernels of the operators: a mechanism computes the same with each of them."""

import pytest
import torch

from tests.helpers.comparing import gradients_of
from tests.helpers.definitions import use_definitions
from tests.helpers.models import CASES, Single
from tests.helpers.operators import DEVICE

ROWS = [(*case, masked) for case in CASES for masked in (False, True)]
QUICK = [
    ("lsh 4 rounds, few buckets", True, True), ("lha", False, False), ("yoso", True, True), ("smart_bird", False, True),
]  # fmt: skip
EVERY = pytest.mark.parametrize(
    "name,causal,masked",
    [pytest.param(*row, marks=[] if row in QUICK else pytest.mark.kernels) for row in ROWS],
)
LENGTH = 25


def results(single, masks):
    """The results of a training pass, and the gradients of all its inputs and of the mechanism's own weights."""
    inputs = [x.to(DEVICE).requires_grad_() for x in single.inputs(LENGTH)]
    output = single(*inputs, training=True, **masks)
    return {"out": output.out.detach(), **gradients_of(single, output, inputs)}


@EVERY
def test_every_implementation_computes_the_same(name, causal, masked, monkeypatch):
    single, masks = Single(name, causal), {}
    single.mechanism.to(DEVICE)
    if masked:
        masks["key_mask"] = (torch.arange(LENGTH).expand(2, -1) < torch.tensor([[20], [LENGTH]])).to(DEVICE)
        masks["segments"] = torch.tensor([0] * 14 + [1] * (LENGTH - 14), device=DEVICE).expand(2, -1)
    monkeypatch.setenv("MEGASPARSE_OPS", "blockwise")
    expected = results(single, masks)
    for implementation in ("triton", "definition"):
        monkeypatch.setenv("MEGASPARSE_OPS", implementation.replace("definition", "blockwise"))
        if implementation == "definition":
            use_definitions(monkeypatch)
        for key, value in results(single, masks).items():
            assert (value is None) == (expected[key] is None), f"{implementation} {key}"
            if value is not None:
                difference = (value - expected[key]).norm()
                assert difference <= 1e-4 * expected[key].norm() + 1e-6, f"{implementation} {key}: {difference}"
