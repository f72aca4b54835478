"""FLOPs against counts made by hand, and against brute force over every query and key."""

import pytest

from megasparse.config.load import build_config
from megasparse.config.schema import ModelConfig
from megasparse.model.decoder import build_decoder
from megasparse.planning.flops import model_flops_per_token

BASE = {"max_length": 64, "layers": 1, "d_model": 32, "d_ff": 48, "heads": 4, "vocabulary": 256}


def model(**changed) -> ModelConfig:
    return build_config({"model": {**BASE, **changed}, "data": {"sequence_length": BASE["max_length"]}}).model


def attention(pattern: str, **kinds) -> dict:
    return {"pattern": [pattern], **kinds}


FEED_FORWARD = 6 * 2 * 32 * 48
HEAD = 6 * 64 * 256  # two streams side by side


def rest(projections: int) -> int:
    return FEED_FORWARD + HEAD + 6 * projections * 32 * 32


def test_full_attention_by_hand():
    keys = sum(range(1, 65)) / 64
    found = model_flops_per_token(model(attention=attention("full")), 64)
    assert found == pytest.approx(rest(4) + 3 * (2 * 32 + 2 * 32) * keys)
    shared = model_flops_per_token(model(attention=attention("full", full={"shared_qk": True})), 64)
    assert found - shared == pytest.approx(6 * 32 * 32)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 100])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64])
def test_local_attention_by_counting_pairs(chunk, length):
    pairs = sum(1 for q in range(length) for k in range(q + 1) if k // chunk >= q // chunk - 1)
    found = model_flops_per_token(model(attention=attention("local", local={"chunk": chunk})), length)
    assert found == pytest.approx(rest(4) + 12 * 32 * pairs / length)


def test_lsh_attention_by_hand():
    # Each round: a band of 8 keys, and in 4 heads of 8 coordinates products with 8 vectors, for 16 buckets.
    found = model_flops_per_token(model(attention=attention("lsh", lsh={"chunk": 8, "rounds": 3})), 64)
    assert found == pytest.approx(rest(3) + 3 * (12 * 32 * 8 + 4 * 8 * 8 * 2))
    chunked = model(attention=attention("lsh", lsh={"chunk": 8, "window": "chunk", "rounds": 1}))
    pairs = sum(1 for q in range(64) for k in range(q + 1) if k // 8 >= q // 8 - 1)
    assert model_flops_per_token(chunked, 64) == pytest.approx(rest(3) + 12 * 32 * pairs / 64 + 4 * 8 * 8 * 2)


def test_layers_add_up_by_the_pattern():
    kinds = {"local": {"chunk": 16}, "lsh": {"chunk": 8}}
    one = {k: model_flops_per_token(model(attention=attention(k, **kinds)), 64) - HEAD for k in ("local", "lsh")}
    mixed = model(layers=5, attention={"pattern": ["local", "local", "lsh"], **kinds})
    assert model_flops_per_token(mixed, 64) == pytest.approx(4 * one["local"] + one["lsh"] + HEAD)


@pytest.mark.parametrize("changed", [{}, {"tied_embeddings": True}, {"blocks": "ordinary", "activations": "stored"}])
@pytest.mark.parametrize("pattern", ["full", "local", "lsh"])
def test_products_with_weights_are_those_of_the_model(changed, pattern):
    """6 × the weights that the built model multiplies by: all its matrices but embeddings and positions."""
    config = model(**changed, attention=attention(pattern, local={"chunk": 64}, lsh={"chunk": 64}))
    matrices = {name: p for name, p in build_decoder(config, 0).named_parameters() if p.dim() == 2}
    weights = sum(p.numel() for name, p in matrices.items() if not name.startswith("embedding."))
    weights += 256 * 32 if config.tied_embeddings else 0
    keys = 32.5 if pattern != "lsh" else config.attention.lsh.rounds * 32.5  # one window holds everything
    hashing = config.attention.lsh.rounds * 2 * 32 if pattern == "lsh" else 0  # 2 buckets
    assert model_flops_per_token(config, 64) == pytest.approx(6 * weights + 12 * 32 * keys + hashing)
