"""Cached decoding gives the logits of the whole-sequence pass, beyond several windows."""

import dataclasses

import pytest
import torch

from megasparse.attention.mechanisms import MECHANISMS
from megasparse.config.schema import ModelConfig
from megasparse.errors import ConfigError
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from tests.helpers.models import PARTS, attention, causal_names, named, random_tokens, small, strict_names

LEAKING = [name for name in causal_names() if name not in strict_names()]
GROUPED = [name for name in strict_names() if name in MECHANISMS]
CONFIGS = {name: small(attention=named(name)) for name in strict_names()} | {
    "mixed, ordinary, tied": small(blocks="ordinary", activations="stored", tied_embeddings=True),
    "split heads": small(attention=attention({"local": 1, "lsh": 1}, "full")),
    "rotary": small(positions={"kind": "rotary"}),
    "learned": small(positions={"kind": "learned"}, head_dim=12),
    "sinusoidal": small(positions={"kind": "sinusoidal"}, tied_embeddings=True),
    **{f"{kind}, parts": small(attention=named(kind), start_token=3, **PARTS) for kind in GROUPED},
}


def decoded_nats(config: ModelConfig, tokens, prompt, **rounds):
    model = build_model(config, seed=3)
    nats = model.token_scores(tokens, RngContext.evaluation(7, len(tokens), **rounds)).nats
    cache = model.new_cache(len(tokens), seed=7, **rounds)
    logits = [model.prefill(tokens[:, :prompt], cache)]
    logits += [model.decode(tokens[:, t], cache) for t in range(prompt, tokens.shape[1] - 1)]
    decoded = -torch.log_softmax(torch.stack(logits, 1), -1).gather(-1, tokens[:, prompt:, None]).squeeze(-1)
    return decoded, nats[:, prompt:]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prompt", [0, 1, 50])
def test_cached_decoding_is_the_whole_sequence(name, prompt):
    decoded, whole = decoded_nats(CONFIGS[name], random_tokens(2, 100), prompt)
    assert (decoded - whole).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["lsh", "yoso"])
def test_more_rounds_in_decoding_too(kind):
    decoded, whole = decoded_nats(small((kind,)), random_tokens(1, 60), 0, rounds=11)
    assert (decoded - whole).abs().max() < 1e-4
    _, usual = decoded_nats(small((kind,)), random_tokens(1, 60), 0)
    assert (decoded - usual).abs().max() > 1e-3


@pytest.mark.parametrize("name", LEAKING)
def test_a_leaking_window_refuses_to_decode(name):
    model = build_model(small(attention=named(name)), seed=0)
    cache = model.new_cache(1, seed=0)
    model.prefill(random_tokens(1, 5), cache)
    with pytest.raises(ConfigError, match=r"cannot decode token by token: .*window = band is strictly causal"):
        model.decode(torch.tensor([0]), cache)


@pytest.mark.parametrize("name", strict_names())
def test_selected_sequences_decode_as_if_alone_in_the_batch(name):
    model, rows = build_model(small(attention=named(name)), seed=3), torch.tensor([2, 0, 2, 1, 2])
    tokens, further = random_tokens(3, 60), random_tokens(5, 8, seed=1)
    cache, alone = model.new_cache(3, seed=7), model.new_cache(5, seed=7)
    model.prefill(tokens[:, :50], cache)
    for t in range(50, 60):
        model.decode(tokens[:, t], cache)
    cache.select(rows)
    alone.rng = dataclasses.replace(alone.rng, samples=rows)  # a sequence keeps its number
    model.prefill(tokens[rows], alone)
    for token in further.unbind(1):
        assert (model.decode(token, cache) - model.decode(token, alone)).abs().max() < 1e-4
