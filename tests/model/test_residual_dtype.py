"""Residual streams in bf16: half the memory of a reversible stack, and gradients near the gradients of fp32 streams."""

import pytest
import torch

from megasparse.errors import ConfigError
from megasparse.model.build import build_model
from megasparse.ops.random import add_dropout, add_dropout_, derive, dropout
from megasparse.settings.load import load_config
from tests.helpers.comparing import error, gradients
from tests.helpers.models import PARTS, attention, random_tokens, small


def gradient(tokens, **changes):
    return gradients(build_model(small(layers=4, **changes), 0), tokens)[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": attention("local"), "dropout": 0.1, "feed_forward_tiles": 3},
        {"attention": attention("local"), "activations": "stored"},
        {"attention": attention("local"), "blocks": "ordinary", "activations": "checkpoint"},
        {"attention": attention("local"), **PARTS},
    ],
)
def test_the_gradient_equals_streams_in_fp32_up_to_their_rounding(changes):
    tokens = random_tokens(2, 128)
    narrow, wide = (gradient(tokens, residual_dtype=dtype, **changes) for dtype in ("bf16", "fp32"))
    assert 1e-4 < error(narrow, wide) < 0.05


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.1, "attention": attention("local", "lsh")},
        {"attention": attention("lha", "yoso"), **PARTS},
        {"attention": attention("lsh").model_copy(update={"head_groups": 2}), "feed_forward_tiles": 3},
    ],
)
def test_streams_rebuilt_in_bf16_give_the_gradient_of_kept_ones_up_to_their_rounding(changes):
    """Codes of hashes, which rounding would flip, are kept. Groups of heads are added, and rounded, one by one."""
    tokens = random_tokens(2, 128)
    settings = {**changes, "residual_dtype": "bf16"}
    rebuilt, kept = (gradient(tokens, activations=kind, **settings) for kind in ("reversible", "stored"))
    assert 1e-4 < error(rebuilt, kept) < 0.05


def test_a_branch_is_added_in_fp32_and_rounded_once():
    generator = torch.Generator().manual_seed(0)
    stream, out = (torch.randn(2, 8, 64, generator=generator) for _ in range(2))
    narrow, rows, key = stream.bfloat16(), torch.arange(16).view(2, 8), derive(0, "a key")
    expected = (narrow.float() + dropout(out, 0.3, key, rows)).bfloat16()
    assert torch.equal(add_dropout(narrow, out, 0.3, key, rows), expected)
    add_dropout_(narrow, out, 0.3, key, rows)
    assert torch.equal(narrow, expected)


def test_settings_that_it_cannot_be_joined_with():
    with pytest.raises(ConfigError, match=r"model.residual_dtype: bf16, but model.style"):
        load_config("yoso_bert", ["model.residual_dtype=bf16"])
