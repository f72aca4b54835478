"""Cached decoding gives the logits of the whole-sequence pass, beyond several windows."""

import pytest
import torch

from megasparse.model.decoder import build_decoder
from megasparse.ops.random import Draws
from tests.helpers.models import attention, random_tokens, small

CONFIGS = {
    "full": dict(attention=attention("full")),
    "full shared": dict(attention=attention("full", shared_qk=True)),
    "local": dict(attention=attention("local")),
    "lsh": dict(attention=attention("lsh")),
    "lsh 4 rounds, few buckets": dict(attention=attention("lsh", lsh={"rounds": 4, "buckets": 2})),
    "lsh rounds not counted": dict(attention=attention("lsh", lsh={"rounds": 3, "buckets": 4, "count_rounds": False})),
    "mixed, ordinary, tied": dict(blocks="ordinary", activations="stored", tied_embeddings=True),
    "rotary": dict(positions={"kind": "rotary"}),
    "learned": dict(positions={"kind": "learned"}, head_dim=12),
    "sinusoidal": dict(positions={"kind": "sinusoidal"}, tied_embeddings=True),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prompt", [0, 1, 50])
def test_cached_decoding_is_the_whole_sequence(name, prompt):
    config = type(small()).model_validate({**small().model_dump(), **{k: dump(v) for k, v in CONFIGS[name].items()}})
    model = build_decoder(config, seed=3)
    tokens = random_tokens(2, 100)
    nats = model.token_scores(tokens, Draws.evaluation(7, 2)).nats
    cache = model.new_cache(2, seed=7)
    logits = [model.prefill(tokens[:, :prompt], cache)]
    logits += [model.decode(tokens[:, t], cache) for t in range(prompt, 99)]
    decoded = -torch.log_softmax(torch.stack(logits, 1), -1).gather(-1, tokens[:, prompt:, None]).squeeze(-1)
    assert (decoded - nats[:, prompt:]).abs().max() < 1e-4


def dump(value):
    return value.model_dump() if hasattr(value, "model_dump") else value


def test_more_rounds_in_decoding_too():
    config = small(("lsh",))
    model = build_decoder(config, seed=3)
    tokens = random_tokens(1, 60)
    nats = model.token_scores(tokens, Draws.evaluation(7, 1, rounds=5)).nats
    cache = model.new_cache(1, seed=7, rounds=5)
    logits = [model.prefill(tokens[:, :0], cache)] + [model.decode(tokens[:, t], cache) for t in range(59)]
    decoded = -torch.log_softmax(torch.stack(logits, 1), -1).gather(-1, tokens[..., None]).squeeze(-1)
    assert (decoded - nats).abs().max() < 1e-4
    assert (decoded - model.token_scores(tokens, Draws.evaluation(7, 1)).nats).abs().max() > 1e-3


def test_the_chunk_window_refuses_to_decode():
    model = build_decoder(small(attention=attention("lsh", lsh={"window": "chunk"})), seed=0)
    cache = model.new_cache(1, seed=0)
    model.prefill(random_tokens(1, 5), cache)
    with pytest.raises(ValueError, match="band"):
        model.decode(torch.tensor([0]), cache)
