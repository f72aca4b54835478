"""Layers recomputed tile by tile, against stored activations, and the bytes that they need."""

import pytest
import torch

from megasparse.attention.heads import Padding
from megasparse.config.schema import LoRAConfig, ModelConfig
from megasparse.errors import ConfigError
from megasparse.model.adapters import add_adapters
from megasparse.model.build import build_model
from megasparse.settings.load import load_config
from tests.helpers.models import PARTS, attention, random_tokens, small, training_draws
from tests.helpers.peak_memory import PeakMemory

STORED = {"blocks": "ordinary", "activations": "stored"}
PATTERNS = {
    "full": ("full",),
    "window, sinks": ("local",),
    "split heads": ({"local": 4, "full": 4}, "full"),
    "hashed, whole": ("lsh", "full"),
    "ranked": ("ranked", {"ranked": 4, "smart_bird": 4}, "full"),
}
CHOICES = {"keys": 5, "sketch_heads": 2, "sketch_dim": 8, "local": True, "chunk": 8, "sinks": 3}
CHOICES = {
    "ranked": {**CHOICES, "buckets": 4, "probes": 2},
    "smart_bird": {**CHOICES, "sketch": "heads", "objective": "attention", "sampling": "top_k"},
}


def step(config, tokens, dtype=torch.float64, lora=False):
    model = build_model(config, 0, dtype)
    if lora:
        add_adapters(model, LoRAConfig(targets=["query", "key", "value", "output"]), 0)
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.data = weight.data.to(dtype) if "lora_A" in name else torch.ones_like(weight, dtype=dtype) / 9
    objective, _ = model(tokens, training_draws(len(tokens), 3))
    objective.backward()
    return objective.detach(), {name: weight.grad for name, weight in model.named_parameters()}


def assert_same(config, tokens, tolerance, dtype=torch.float64, lora=False, **changes):
    stored, recomputed = (
        step(config.model_copy(update=update), tokens, dtype, lora)
        for update in (STORED, {"activations": "checkpoint", **changes})
    )
    torch.testing.assert_close(recomputed[0], stored[0], rtol=tolerance, atol=0)
    for name, exact in stored[1].items():
        assert (recomputed[1][name] is None) == (exact is None), name
        if exact is not None:
            bar = tolerance * max(exact.abs().max().item(), 1e-12)
            torch.testing.assert_close(recomputed[1][name], exact, rtol=0, atol=bar, msg=name)


@pytest.mark.parametrize(
    "pattern,separator,changes",
    [
        *[(pattern, None, {"checkpoint_layers": 2}) for pattern in PATTERNS],
        *[
            pytest.param(
                *(pattern, 10, {"activations": "checkpoint_cpu"}),
                marks=pytest.mark.slow if pattern in ("split heads", "hashed, whole") else (),
            )
            for pattern in PATTERNS
        ],
    ],
)
def test_gradients_equal_those_of_stored_activations(pattern, separator, changes):
    """With grouped keys, biases, norms of queries and keys, dropout and an uneven last tile."""
    layers = attention(*PATTERNS[pattern], lsh={"shared_qk": False}, local={"chunk": 8, "sinks": 3}, **CHOICES)
    parts = {**PARTS, "key_heads": 4, "attention_biases": "all", "query_key_norm": True, "dropout": 0.1}
    settings = {"heads": 8, "layers": 3, "feed_forward_tiles": 4, "document_separator": separator}
    config = small(attention=layers, **{**parts, **settings, **STORED})
    tokens = random_tokens(2, 50, vocabulary=12)
    assert_same(config, tokens, 1e-10, **changes)


def test_adapters_of_frozen_weights_get_the_same_gradients_also_in_float32():
    config = small(attention=attention("full"), **{**PARTS, "layers": 3, "feed_forward_tiles": 5, **STORED})
    assert_same(config, random_tokens(2, 50), 1e-10, lora=True, checkpoint_layers=3)
    assert_same(config, random_tokens(2, 50), 1e-5, torch.float32, lora=True)


@pytest.mark.parametrize("changes", [{"padding_token": 11}, {"feed_forward_tiles": 200}, {"kind": "encoder"}], ids=str)
def test_padding_encoders_and_tiles_of_one_token_too(changes):
    settings = {"layers": 2, "vocabulary": 257, "feed_forward_tiles": 4, **changes, **STORED}
    config = small(attention=attention("full"), **{**PARTS, **settings})
    tokens = random_tokens(2, 40, vocabulary=12)
    tokens[0, -7:] = 11
    assert_same(config, tokens, 1e-10)


def test_evaluation_equals_stored_layers_and_a_stack_leaves_the_gradients_of_others():
    config = small(attention=attention("full"), **{**PARTS, "layers": 2, "feed_forward_tiles": 4, **STORED})
    tokens = random_tokens(1, 40)
    model = build_model(config.model_copy(update={"activations": "checkpoint"}), 0)
    torch.testing.assert_close(model.eval()(tokens)[0], build_model(config, 0).eval()(tokens)[0])
    (stream,), _, _ = model.streams(tokens, training_draws(1), Padding())
    gradient = torch.ones_like(stream)
    stream.backward(gradient)
    assert torch.equal(gradient, torch.ones_like(stream))


def test_no_gradient_of_a_frozen_embedding_is_stored():
    settings = {**PARTS, "layers": 1, "feed_forward_tiles": 4, **STORED, "activations": "checkpoint"}
    model = build_model(small(attention=attention("full"), **settings), 0)
    add_adapters(model, LoRAConfig(targets=["query"]), 0)
    stored = []
    model.layers[0].register_forward_pre_hook(lambda block, arguments: stored.append(arguments[-1]))
    model(random_tokens(1, 40), training_draws(1))[0].backward()
    assert stored[0].requires_grad and not stored[0].is_leaf


def test_a_token_needs_its_keys_their_gradients_and_that_of_the_stream():
    """From 4 to 8 tiles of 64 tokens a backward grows by the gradient of the stream, keys and values (4 bytes each) and
    their gradients: 4·E + 2·2·4·G·D bytes per token, and in the attention of a prefix one head's gradients."""
    settings = {"d_model": 256, "d_ff": 512, "heads": 8, "key_heads": 2, "vocabulary": 64, "layers": 2}
    settings |= {"activations": "checkpoint", "blocks": "ordinary", "positions": {"kind": "rotary"}}
    stream, keys, of_head = 4 * 256, 2 * 4 * 2 * 32, 2 * 4 * 4 * 32
    peaks = []
    for tiles in (4, 8):
        layers = attention("local", local={"chunk": 16})
        changes = {"max_length": 512, "attention": layers, "feed_forward_tiles": tiles, "loss_tiles": 4 * tiles}
        model = build_model(ModelConfig(**settings, **changes), seed=0)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        tokens = random_tokens(1, 64 * tiles, 64)
        with PeakMemory() as memory:
            model(tokens, training_draws(1))[0].backward()
        peaks.append(memory.peak)
    inputs = 2 * stream  # of two layers, which stay on the device
    per_token = (peaks[1] - peaks[0]) / (4 * 64) - inputs
    assert stream + 2 * keys <= per_token <= stream + 2 * keys + of_head + 64


def test_layers_recomputed_together_need_checkpoints():
    with pytest.raises(ConfigError, match=r"model\.checkpoint_layers: 2 is given"):
        load_config("quickstart", ["model.checkpoint_layers=2"])
