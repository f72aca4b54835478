"""Sentence order: swapped pairs, the model's inputs, and learning."""

import pytest
import torch
import torch.nn.functional as F

from megasparse.config.schema import MaskingConfig, SentenceOrderConfig
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from tests.helpers import models
from tests.helpers.comparing import assert_near, gradients
from tests.helpers.models import named, small, training_draws
from tests.model.test_encoder import BEGIN, MASK, PAD, SEPARATOR, VOCABULARY, pairs, text

BERT = {**models.BERT, "token_types": 2}


def encoder(pattern=("full",), **changes):
    order = SentenceOrderConfig(separator=SEPARATOR)
    settings = dict(kind="encoder", vocabulary=VOCABULARY, padding_token=PAD, sentence_order=order)
    return build_model(small(pattern, **{**settings, **changes}), 0)


def swapped_by_hand(row):
    row = row.tolist()
    first = row.index(SEPARATOR)
    second = row.index(SEPARATOR, first + 1)
    a, b, rest = row[1:first], row[first + 1 : second], row[second + 1 :]
    return torch.tensor([row[0], *b, SEPARATOR, *a, SEPARATOR, *rest])


def test_half_of_the_pairs_are_swapped_whole():
    model, tokens = encoder(layers=1), pairs(400, 40)
    arranged = model.sentence_order.arrange(tokens, training_draws(400))
    swapped = 0
    for before, after in zip(tokens, arranged, strict=True):
        other = swapped_by_hand(before)
        assert torch.equal(after, before) or torch.equal(after, other)
        swapped += not torch.equal(after, before)
    assert abs(swapped - 200) < 45
    rest = RngContext(0, 0, torch.arange(7, 400), training=True)
    assert torch.equal(model.sentence_order.arrange(tokens[7:], rest), arranged[7:])
    assert not torch.equal(model.sentence_order.arrange(tokens, training_draws(400, step=1)), arranged)


def test_empty_segments_and_malformed_pairs():
    model = encoder(layers=1)
    rows = torch.tensor([[BEGIN, SEPARATOR, 5, 6, SEPARATOR, PAD], [BEGIN, 5, 6, SEPARATOR, SEPARATOR, PAD]] * 8)
    arranged = model.sentence_order.arrange(rows, training_draws(16))
    assert all(torch.equal(a, r) or torch.equal(a, swapped_by_hand(r)) for a, r in zip(arranged, rows, strict=True))
    none = text(16, 30)
    none[:, 11] = SEPARATOR  # a single one
    assert torch.equal(model.sentence_order.arrange(none, training_draws(16)), none)
    _, statistics = model(none, training_draws(16))
    assert statistics["sentence_order_nats"] == 0 and statistics["sentence_order_accuracy"] == 0


@pytest.mark.parametrize("style", ["reformer", "bert"])
def test_the_objective_adds_the_mean_of_the_sequences(style):
    changes = BERT if style == "bert" else {}
    tokens, rng = pairs(6, 50), RngContext.evaluation(0, 6)
    model = encoder(layers=2, **changes)
    scores = model.sentence_order_scores(tokens, rng)
    assert scores.scored.all() and scores.nats.shape == (6,)
    masked = model.token_scores(tokens, rng)
    objective, statistics = model(tokens, rng)
    torch.testing.assert_close(objective, masked.nats[masked.scored].mean() + scores.nats.mean())
    torch.testing.assert_close(statistics["sentence_order_nats"], scores.nats.mean())
    assert statistics["sentence_order_accuracy"] == scores.correct.float().mean()
    torch.testing.assert_close(statistics["nats"], masked.nats[masked.scored].sum())


@pytest.mark.parametrize("style", ["reformer", "bert"])
def test_the_head_is_a_pooler_of_the_first_position(style):
    model = encoder(layers=2, **(BERT if style == "bert" else {}))
    tokens, rng = pairs(16, 30), RngContext.evaluation(0, 16)
    order, streams = model.sentence_order, [torch.randn(16, 30, 32) for _ in range(1 if style == "bert" else 2)]
    x = sum(streams)[:, 0] / len(streams)
    if style == "reformer":
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    logits = torch.tanh(x @ order.dense.T) @ order.weight.T
    arranged = order.arrange(tokens, rng)
    label = (arranged != tokens).any(1).long()
    assert set(label.tolist()) == {0, 1}
    found = order(tuple(streams), arranged, rng)
    torch.testing.assert_close(found.nats, -F.log_softmax(logits, -1)[torch.arange(16), label])
    assert torch.equal(found.correct, logits.argmax(1) == label)


def test_token_types_follow_the_first_separator():
    model, tokens = encoder(**BERT, layers=1), pairs(3, 30)
    types = torch.zeros(3, 30, dtype=torch.int64)
    for row, own in zip(tokens.tolist(), types, strict=True):
        own[row.index(SEPARATOR) + 1 :] = 1
    embedding = model.embedding
    found = embedding(tokens, 0)
    position = embedding.positions(0, 30, torch.device("cpu"))
    expected = embedding.norm(embedding.weight[tokens] + embedding.token_types[types] + position)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        embedding.token_types[1] += 1000.0
    after = embedding(tokens, 0)
    assert torch.equal((after != found).any(-1), types.bool())


def test_reversible_layers_give_the_gradients_of_stored_activations():
    settings = {"attention": named("lsh"), "layers": 1, "masking": MaskingConfig(token=MASK)}
    models = (encoder(activations=kind, **settings) for kind in ("reversible", "stored"))
    ours, stored = (gradients(model, pairs(2, 60))[1] for model in models)
    assert {"sentence_order.dense", "sentence_order.weight", "sentence_order.bias"} <= stored.keys()
    assert_near(ours, stored, 1e-4)
