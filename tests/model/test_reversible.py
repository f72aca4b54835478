"""Reversible layers against stored activations, under conditions that must not change them."""

import pytest
import torch

from megasparse.attention.contract import Attention, AttentionOutput, MechanismSpec
from megasparse.attention.heads import Padding
from megasparse.errors import ConfigError
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext, relu_dropout
from tests.helpers.cases import together
from tests.helpers.comparing import error, gradients
from tests.helpers.models import PARTS, attention, random_tokens, small, small_pair, training_draws


def reversible_and_stored(dtype=torch.float32, **changes):
    config = small(**changes)
    stored = config.model_copy(update={"activations": "stored"})
    return build_model(config, 0, dtype), build_model(stored, 0, dtype)


@pytest.mark.parametrize("parts", [{}, PARTS, {**PARTS, "feed_forward": "geglu", "feed_forward_tiles": 3}])
def test_gradients_at_depth_12_with_dropout_and_lsh_in_fp32(parts):
    ours, stored = reversible_and_stored(layers=12, dropout=0.1, attention=attention("local", "lsh"), **parts)
    tokens = random_tokens(2, 128)
    (loss, a), (exact_loss, b) = gradients(ours, tokens), gradients(stored, tokens)
    assert loss == exact_loss
    assert error(a, b) < 1e-5


@pytest.mark.parametrize("twice", [False, True])
def test_the_embedding_counts_once_for_blocks_that_add_nothing(twice):
    """The streams' sum is then the embedding, as with ordinary blocks, and twice that as in Reformer's paper."""
    pair = build_model(small_pair(embedding_twice=twice), 0)
    assert pair.embedding_once != twice
    for block in pair.encoder.blocks:
        for parameter in block.parameters():
            torch.nn.init.zeros_(parameter)
    tokens = random_tokens(2, 40)
    streams, _, _ = pair.encoder.streams(tokens, RngContext.evaluation(0, 2), Padding())
    torch.testing.assert_close(sum(streams), (1 + twice) * pair.encoder.embedding(tokens, 0))


def test_gradients_at_depth_24_in_bf16():
    ours, stored = reversible_and_stored(torch.bfloat16, layers=24, dropout=0.1, attention=attention("local", "lsh"))
    tokens = random_tokens(2, 128)
    assert error(gradients(ours, tokens)[1], gradients(stored, tokens)[1]) < 1e-2


def test_the_backward_computes_under_the_autocast_of_the_forward():
    tokens, found = random_tokens(2, 128), []
    for model in reversible_and_stored(dropout=0.1, feed_forward_tiles=3):
        with torch.autocast("cpu", torch.bfloat16):
            objective, _ = model(tokens, training_draws(2))
        objective.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert error(*found) < 1e-5


@together("groups", [1, 2])
def test_gradients_that_it_cannot_return_are_one_line(groups):
    """Each branch's backward fills `.grad`, so torch.autograd.grad would return None for every weight of a block."""
    model = build_model(small(attention={**attention("local", "lsh").model_dump(), "head_groups": groups}), 0)
    tokens, message = random_tokens(1, 32), r"model.activations: \"reversible\" cannot return.*Call backward\(\)"
    with pytest.raises(ConfigError, match=message):
        torch.autograd.grad(model(tokens)[0], list(model.parameters()))
    with pytest.raises(ConfigError, match=message):
        model(tokens)[0].backward(inputs=[model.embedding.weight])


def test_tiles_inside_reversible_blocks_change_nothing():
    whole, tiled = (build_model(small(dropout=0.1, feed_forward_tiles=t, loss_tiles=t), 0) for t in (1, 5))
    tokens = random_tokens(2, 90)
    (loss, a), (tiled_loss, b) = gradients(whole, tokens), gradients(tiled, tokens)
    torch.testing.assert_close(loss, tiled_loss)
    assert error(b, a) < 1e-5


def test_a_tile_of_the_feed_forward_is_computed_twice_a_step(monkeypatch):
    tiles, computed = 3, []

    def counted(x, *rest):
        computed.append(x.shape[1])
        return relu_dropout(x, *rest)

    monkeypatch.setattr("megasparse.model.block.relu_dropout", counted)
    config = small(feed_forward_tiles=tiles)
    gradients(build_model(config, 0), random_tokens(2, 90))
    assert computed == [90 // tiles] * tiles * config.layers * 2


def test_a_second_forward_before_the_first_backward_changes_nothing():
    model = build_model(small(dropout=0.1), 0)
    tokens, others = random_tokens(2, 100), random_tokens(3, 70, seed=1)
    _, expected = gradients(model, tokens)
    model.zero_grad()
    first, _ = model(tokens, training_draws(2))
    second, _ = model(others, training_draws(3, step=9))
    model.token_scores(others, training_draws(3, step=5))
    first.backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
    second.backward()


def test_codes_are_kept_not_hashed_again():
    """Without its memory, a recomputed layer would hash its rebuilt input, whose last bits differ."""
    model = build_model(small(("lsh",)), 0)
    mechanism = model.blocks[0].attention.attention.mechanisms["lsh"]
    calls = []
    assign = mechanism.assign
    mechanism.assign = lambda q, context: calls.append(1) or assign(q, context)
    gradients(model, random_tokens(1, 50))
    assert len(calls) == 1


def test_an_auxiliary_loss_trains_its_private_weights():
    class WithAuxiliary(Attention):
        has_auxiliary_loss = True

        def __init__(self, config):
            super().__init__(config, MechanismSpec(heads=2, head_dim=16, d_model=32, max_length=128, causal=True))
            self.own = torch.nn.Parameter(torch.ones(()))

        def forward(self, x, heads, context):
            return AttentionOutput(heads.v, (x.float() ** 2).mean() * self.own**3, {"size": self.own.detach()})

    results = {}
    for activations in ("reversible", "stored"):
        model = build_model(small(("full",), activations=activations, layers=3), 0)
        mechanisms = model.blocks[1].attention.attention.mechanisms
        mechanisms["full"] = WithAuxiliary(mechanisms["full"].config)
        tokens = random_tokens(2, 40)
        objective, statistics = model(tokens, training_draws(2))
        assert statistics["attention/full/size"] == 1.0
        assert objective.item() > (statistics["nats"] / statistics["tokens"]).item() + 0.1
        results[activations] = gradients(model, tokens)[1]
    assert results["stored"]["blocks.1.attention.attention.mechanisms.full.own"] > 0.1
    assert error(results["reversible"], results["stored"]) < 1e-5


@pytest.mark.parametrize("activations", ["checkpoint", "checkpoint_cpu"])
def test_checkpointed_ordinary_blocks_are_as_stored_ones(activations):
    settings = dict(blocks="ordinary", dropout=0.1, attention=attention("local", "lsh"))
    checkpointed, stored = reversible_and_stored(activations=activations, **settings)
    assert [n for n, _ in stored.named_parameters()] == [n for n, _ in checkpointed.named_parameters()]
    tokens = random_tokens(2, 100)
    (loss, a), (stored_loss, b) = gradients(checkpointed, tokens), gradients(stored, tokens)
    assert loss == stored_loss
    assert a.keys() == b.keys()
    assert error(a, b) < 1e-6
