"""Cached decoding gives the logits of the whole-sequence pass, beyond several windows: bit by bit where keys are in
buckets or in a window by position, else up to rounding."""

import dataclasses

import pytest
import torch
from torch.utils._pytree import tree_leaves

from megasparse.config.attention import MECHANISMS
from megasparse.errors import ConfigError
from megasparse.model.build import build_model
from megasparse.model.decoder import Decoder
from megasparse.ops.random import RngContext
from tests.helpers.comparing import decoded_nats
from tests.helpers.models import (
    NGRAMS,
    PARTS,
    attention,
    by_path,
    by_path_and_numbers,
    causal_names,
    kind_of,
    named,
    random_tokens,
    small,
    strict_names,
    with_tables,
)

LEAKING = [name for name in causal_names() if name not in strict_names()]
HASHED = ("lsh", "lha", "routing", "random", "ngram")
GROUPED = [name for name in strict_names() if name in MECHANISMS]
SHIFTED = {"shifted_keys": True, "sinks": 2}
CONFIGS = {
    "mixed, ordinary, tied": small(blocks="ordinary", activations="stored", tied_embeddings=True),
    "split heads": small(attention=attention({"local": 1, "lsh": 1}, "full")),
    "rotary": small(positions={"kind": "rotary"}),
    "rotary, except shifted": small(attention=attention("lsh", "local", lsh=SHIFTED), positions={"kind": "rotary"}),
    "learned": small(positions={"kind": "learned"}, head_dim=12),
    "sinusoidal": small(positions={"kind": "sinusoidal"}, tied_embeddings=True),
}


BIT_BY_BIT = [n for n in strict_names() if n != "local relative" and kind_of(n) in {*HASHED, "local"}]


def whole_nats(model: Decoder, tokens, **rounds):
    return model.token_scores(tokens, RngContext.evaluation(7, len(tokens), **rounds)).nats


def decoded(model: Decoder, tokens, prompt, **rounds):
    return decoded_nats(model, tokens, prompt, model.new_cache(len(tokens), seed=7, **rounds))


def check_decoding(config, dtype=torch.float32, limit=1e-4):
    model, tokens = with_tables(build_model(config, seed=3)).to(dtype), random_tokens(2, 70)
    whole = whole_nats(model, tokens)
    for prompt, end in ((0, 36), (1, 5), (50, 66)):
        assert (decoded(model, tokens[:, :end], prompt) - whole[:, prompt:end]).abs().max() <= limit, prompt


@by_path_and_numbers([*BIT_BY_BIT, "split heads"])
def test_cached_decoding_is_the_whole_sequence_bit_by_bit(name, dtype, threads):
    config = attention({"local": 1, "lsh": 1}) if name == "split heads" else named(name)
    check_decoding(small(attention=config, ngrams=NGRAMS), dtype, limit=0.0)


@by_path("name", ["ranked", "ranked members, sinks", "smart_bird local, sinks"])
def test_cached_choices_of_sketches_are_the_whole_sequence_bit_by_bit(name):
    parts = {"heads": 4, "key_heads": 2, "positions": {"kind": "rotary"}}
    check_decoding(small(attention=named(name), **parts), torch.bfloat16, limit=0.0)


@by_path("name", sorted(set(strict_names()) - set(BIT_BY_BIT)))
def test_cached_decoding_is_the_whole_sequence(name):
    check_decoding(small(attention=named(name)))


@by_path("name", GROUPED)
def test_cached_decoding_with_the_parts_of_todays_decoders(name):
    check_decoding(small(attention=named(name), start_token=3, **PARTS))


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_decoding_in_positions_and_splits(name):
    check_decoding(CONFIGS[name])


@pytest.mark.parametrize("kind", ["lsh", "yoso"])
def test_more_rounds_in_decoding_too(kind):
    model, tokens = build_model(small((kind,)), seed=3), random_tokens(1, 40)
    found = decoded(model, tokens, 0, rounds=11)
    assert (found - whole_nats(model, tokens, rounds=11)).abs().max() < 1e-4
    assert (found - whole_nats(model, tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["performer", "yoso", "yoso gaussian, convolution"])
def test_sums_that_run_along_the_sequence_are_all_that_is_kept(name):
    model, tokens, sizes = build_model(small(attention=named(name)), seed=3), random_tokens(1, 60), []
    for length in (5, 60):
        cache = model.new_cache(1, seed=7)
        model.prefill(tokens[:, :length], cache)
        model.decode(tokens[:, 0], cache)
        kept = tree_leaves([vars(own) for layer in cache.layers for own in layer.values()])
        sizes.append([x.shape for x in kept if x is not None])
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("name", LEAKING)
def test_a_leaking_window_refuses_to_decode(name):
    model = build_model(small(attention=named(name)), seed=0)
    cache = model.new_cache(1, seed=0)
    model.prefill(random_tokens(1, 5), cache)
    with pytest.raises(ConfigError, match=r"cannot decode token by token: .*window = band is strictly causal"):
        model.decode(torch.tensor([0]), cache)


@by_path("name", strict_names())
def test_selected_sequences_decode_as_separate_batches(name):
    model = with_tables(build_model(small(attention=named(name), ngrams=NGRAMS), seed=3))
    rows = torch.tensor([2, 0, 2, 1, 2])
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


@pytest.mark.parametrize("masks", [{}, {"padding_token": 2}, {"document_separator": 3}])
def test_ordinary_full_attention_with_shared_queries_has_the_queries_as_keys(masks):
    """Whole sequences and cached decoding equal a model whose key projection equals its query projection."""
    tokens = random_tokens(2, 70)
    models = []
    for full in ({"shared_qk": True, "ordinary": True}, {}):
        config = small(attention=attention("full", full=full), **masks)
        models.append(build_model(config, seed=3).double())
    shared, separate = models
    weights = shared.state_dict()
    for name, value in separate.state_dict().items():
        value.copy_(weights[name.replace(".key.", ".query.")])
    torch.testing.assert_close(whole_nats(shared, tokens), whole_nats(separate, tokens), rtol=0, atol=1e-12)
    caches = [model.new_cache(2, seed=7) for model in models]
    nats = [decoded_nats(model, tokens, 30, cache) for model, cache in zip(models, caches, strict=True)]
    torch.testing.assert_close(*nats, rtol=0, atol=1e-12)
