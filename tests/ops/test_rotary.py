"""Frequencies of rotary positions equal transformers, and rotations depend only on distances."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megasparse.ops.positions import Rotary

BASE, DIM = 5000.0, 16
THEIRS = {
    "linear": ({}, {}),
    "llama3": (
        {"original_length": 64},
        {"original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "yarn": ({"original_length": 64}, {"original_max_position_embeddings": 64}),
    "yarn, attention factor": (
        {"original_length": 300, "attention_factor": 1.25},
        {"original_max_position_embeddings": 300, "attention_factor": 1.25},
    ),
}


@pytest.mark.parametrize("name", THEIRS)
def test_scaled_frequencies_equal_transformers(name):
    kind, (mine, yours) = name.split(",")[0], THEIRS[name]
    scaling = {"kind": kind, "factor": 4.0, **mine}
    rotary = Rotary(DIM, BASE, **scaling)
    parameters = {"rope_type": kind, "rope_theta": BASE, "factor": 4.0, **yours}
    config = LlamaConfig(hidden_size=2 * DIM, num_attention_heads=2, rope_parameters=parameters)
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    torch.testing.assert_close(rotary.frequencies().float(), frequencies)
    assert rotary.scale == pytest.approx(scale)


def test_ntk_keeps_the_fastest_pair_and_slows_the_slowest_by_the_factor():
    plain, scaled = (Rotary(DIM, BASE, **scaling).frequencies() for scaling in ({}, {"kind": "ntk", "factor": 4.0}))
    assert scaled[0] == plain[0] == 1.0
    torch.testing.assert_close(scaled[-1], plain[-1] / 4)


def test_a_rotation_turns_each_pair_and_scales_it():
    scaling = {"kind": "yarn", "factor": 4.0, "original_length": 64}
    rotary = Rotary(4, BASE, **scaling)
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).view(1, 1, 1, 4)
    (a, b), scale = rotary.frequencies().tolist(), 0.1 * math.log(4) + 1
    expected = [math.cos(7 * a), -2 * math.sin(7 * b), math.sin(7 * a), 2 * math.cos(7 * b)]
    torch.testing.assert_close(rotary(x, 7).flatten(), scale * torch.tensor(expected))
