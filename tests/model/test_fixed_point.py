"""Residual streams in fixed point: the backward rebuilds them to the bit."""

from collections import defaultdict

import pytest
import torch

from megasparse.config.load import load_config
from megasparse.errors import ConfigError
from megasparse.model.block import Branch
from megasparse.model.build import build_model
from megasparse.ops.fixed_point import to_fixed_point
from tests.helpers.models import PARTS, attention, random_tokens, small, training_draws


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 2.0**8), (torch.float64, 2.0**37)])
def test_sums_of_multiples_are_undone_to_the_bit(dtype, largest):
    generator = torch.Generator().manual_seed(0)
    stream, added = (torch.randn(10_000, generator=generator, dtype=dtype) * largest / 8 for _ in range(2))
    start, rounded = to_fixed_point(stream, 14), to_fixed_point(added, 14)
    assert torch.equal(rounded, (added.double() * 2**14).round().to(dtype) / 2**14)
    assert torch.equal((start + rounded) - rounded, start)
    if dtype == torch.float32:
        assert not torch.equal((stream + added) - added, stream)  # as without it


def test_the_gradient_is_that_of_the_number_itself():
    x = torch.linspace(-3, 3, 50, requires_grad=True)
    (gradient,) = torch.autograd.grad(to_fixed_point(x, 6).sum(), x)
    assert torch.equal(gradient, torch.ones(50))


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.1, "attention": attention("local", "lsh")},
        {"feed_forward_tiles": 3, "attention": attention("yoso", "smart_bird")},
        {"attention": attention("lha", "routing"), **PARTS},
        {"dropout": 0.1, "feed_forward_tiles": 3, "attention": attention("lsh").model_copy(update={"head_groups": 2})},
    ],
)
def test_every_branch_has_its_output_again_to_the_bit(changes, monkeypatch):
    outputs, again = defaultdict(list), defaultdict(list)
    write = Branch.write

    def keep(self, stream, out, rng, sign, rows):
        (outputs if sign == 1 else again)[self].append(out.detach().clone())
        write(self, stream, out, rng, sign, rows)

    monkeypatch.setattr(Branch, "write", keep)

    def same(bits):
        outputs.clear(), again.clear()
        tokens = random_tokens(2, 128)
        model = build_model(small(layers=6, residual_bits=bits, **changes), 0)
        model(tokens, training_draws(2))[0].backward()
        assert len(outputs) == len(again) == 12
        pairs = (zip(outputs[branch], again[branch], strict=True) for branch in outputs)
        return all(torch.equal(x, y) for branch in pairs for x, y in branch)

    assert same(14) and not same(None)


def test_ordinary_blocks_have_nothing_to_rebuild():
    settings = ["model.blocks=ordinary", "model.activations=stored", "model.residual_bits=14"]
    with pytest.raises(ConfigError, match=r"model.residual_bits: 14 is given, but model.blocks"):
        load_config("quickstart", settings)
