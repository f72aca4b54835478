"""Passes of deep models that are continued from shallow ones, against the passes of the deep models themselves."""

import numpy as np
import pytest

from megasparse.config.load import build_config
from megasparse.planning.depth import shallow
from megasparse.planning.pass_memory import PassMemory

BASE = {"max_length": 1024, "d_model": 32, "d_ff": 64, "heads": 4, "feed_forward_tiles": 4, "loss_tiles": 2}
ORDINARY = {"blocks": "ordinary"}
MODELS = {
    "reversible, lsh": {"layers": 7, "attention": {"pattern": ["lsh"]}},
    "checkpoint, lha": {**ORDINARY, "layers": 6, "activations": "checkpoint", "attention": {"pattern": ["lha"]}},
    "checkpoint_cpu, tied": {
        **ORDINARY, "layers": 6, "activations": "checkpoint_cpu", "tied_embeddings": True,
        "attention": {"pattern": ["full"]},
    },
    "stored, by turns": {
        **ORDINARY, "layers": 13, "activations": "stored", "attention": {"pattern": ["local", "full"]},
    },
    "reversible, by turns, lsh beside": {
        "layers": 11, "attention": {"pattern": ["local", {"local": 2, "lsh": 2}]}, "dropout": 0.1,
    },
}  # fmt: skip


def passes(model):
    return PassMemory(build_config({"model": {**BASE, **model}, "data": {"sequence_length": 1024}}), "counted")


@pytest.mark.parametrize("name", MODELS)
def test_a_deep_model_is_continued_from_shallow_ones(name):
    deep = passes(MODELS[name])
    assert [model.layers < deep.config.model.layers for model in shallow(deep.config.model)] == [True, True]
    continued, whole = deep._deep_phases(1, 1024), deep._phases(1, 1024)
    assert continued.ends == whole.ends
    np.testing.assert_array_equal(continued.gradients, whole.gradients)
    np.testing.assert_allclose(continued.beside, whole.beside, rtol=0.002)


def test_shallow_models_and_two_stacks_are_measured_themselves():
    assert shallow(passes({"layers": 4}).config.model) == []
    assert shallow(passes({"layers": 8, "kind": "encoder_decoder", "source": {"length": 512}}).config.model) == []
