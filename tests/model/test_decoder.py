import math

import pytest
import torch

from megasparse.attention.heads import Padding
from megasparse.config.schema import PositionsConfig
from megasparse.model.build import build_model
from megasparse.model.embedding import Positions
from megasparse.model.stack import padding_of
from megasparse.ops.random import RngContext
from tests.helpers.models import (
    AXIAL,
    NGRAMS,
    attention,
    padded_and_packed,
    random_tokens,
    small,
    small_pair,
    training_draws,
    with_tables,
)


def test_weights_are_a_function_of_seed_and_name():
    a, b, other = build_model(small(), 0), build_model(small(), 0), build_model(small(), 1)
    deeper = build_model(small(layers=6), 0)
    for name, weight in a.named_parameters():
        assert torch.equal(weight, b.get_parameter(name))
        assert weight.dim() < 2 or not torch.equal(weight, other.get_parameter(name))
    name = "blocks.1.attention.attention.query.weight"
    assert torch.equal(a.get_parameter(name), deeper.get_parameter(name))


def test_initial_buckets_are_almost_equally_likely():
    parameters = build_model(small(("ranked",)), 0).named_parameters()
    scores = [weight for name, weight in parameters if name.endswith("_buckets.weight")]
    assert scores and all(abs(weight.std() / 0.02 - 1) < 0.1 for weight in scores)


def test_every_weight_is_trained():
    changes = {}, {"tied_embeddings": True, "ngrams": {"rows": 50}}, {"blocks": "ordinary", "activations": "stored"}
    for config in (small(**changed) for changed in changes):
        model = build_model(config, 0)
        model(random_tokens(2, 128), training_draws(2))[0].backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.norm() > 0, name


def test_a_fresh_model_knows_nothing():
    nats = build_model(small(), 0).token_scores(random_tokens(4, 128), RngContext.evaluation(0, 4)).nats
    assert nats.shape == (4, 128)
    assert abs(nats.mean() - math.log(256)) < 1.0


def test_the_objective_is_the_mean_of_scored_nats():
    model = build_model(small(score_from=30), 0)
    tokens = random_tokens(2, 100)
    objective, statistics = model(tokens, RngContext.evaluation(0, 2))
    nats, correct, scored = (x[:, 30:] for x in model.token_scores(tokens, RngContext.evaluation(0, 2)))
    assert scored.all()
    assert statistics["tokens"] == 140
    torch.testing.assert_close(objective, nats.mean())
    torch.testing.assert_close(statistics["nats"], nats.sum())
    torch.testing.assert_close(statistics["accuracy"], correct.float().mean())


def test_dropout_only_in_training_and_only_by_step_and_sample():
    model = build_model(small(dropout=0.2), 0)
    tokens = random_tokens(2, 60)
    evaluated = model.token_scores(tokens, RngContext.evaluation(0, 2)).nats
    assert torch.equal(evaluated, model.token_scores(tokens, RngContext.evaluation(0, 2)).nats)
    trained = model.token_scores(tokens, training_draws(2)).nats
    assert not torch.equal(trained, evaluated)
    assert not torch.equal(trained, model.token_scores(tokens, training_draws(2, step=1)).nats)
    second = model.token_scores(tokens[1:], RngContext(0, 0, torch.tensor([1]), training=True)).nats
    torch.testing.assert_close(second, trained[1:], rtol=1e-4, atol=1e-5)


def test_rounds_are_changed_at_evaluation():
    model = build_model(small(("lsh",), attention=attention("lsh", lsh={"rounds": 1, "evaluation_rounds": 4})), 0)
    tokens = random_tokens(2, 100)
    default = model.token_scores(tokens, RngContext.evaluation(0, 2)).nats
    assert torch.equal(default, model.token_scores(tokens, RngContext.evaluation(0, 2, rounds=4)).nats)
    assert not torch.equal(default, model.token_scores(tokens, RngContext.evaluation(0, 2, rounds=1)).nats)


def test_axial_positions_are_all_different_and_factorised():
    positions = Positions(small(positions=AXIAL))
    with torch.no_grad():
        for axis in positions.axes:
            axis.copy_(torch.randn(axis.shape, generator=torch.Generator().manual_seed(axis.shape[0])))
    table = positions(0, 128, torch.device("cpu"))
    assert table.shape == (128, 32) and len(table.unique(dim=0)) == 128
    assert sum(p.numel() for p in positions.parameters()) == 8 * 12 + 16 * 20
    assert torch.equal(table[37], torch.cat([positions.axes[0][37 // 16], positions.axes[1][37 % 16]]))
    assert torch.equal(positions(37, 2, torch.device("cpu")), table[37:39])


@pytest.mark.parametrize("width", [7, None])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_ngram_embeddings_are_as_defined(kind, width):
    """The row of an n-gram is a function of its known tokens, here from a dict, and different for different ones."""
    ngrams, ahead = {**NGRAMS, "rows": 1 << 16, "width": width}, int(kind == "encoder")
    model, plain = (build_model(small(kind=kind, vocabulary=257, ngrams=x), 3) for x in (ngrams, None))
    tokens, masks = random_tokens(2, 60, 3), padded_and_packed(60)
    read, padding = tokens if ahead else tokens[:, :-1], Padding(**masks)
    codes = model._newest_tokens(read, 0, padding)[1]
    assert torch.equal(model.embedding(read, 0, codes), plain.embedding(read, 0))  # tables start at 0
    with_tables(model)
    rows, expected = dict[tuple, int](), torch.zeros(2, 60, 3, width or 32)
    for b, i, number in ((b, i, number) for b in range(2) for i in range(60) for number in range(3)):
        ends = range(i + ahead - NGRAMS["lengths"][number], i + ahead)
        same = [j >= 0 and bool(masks["key_mask"][b, j]) and masks["segments"][b, j] == masks["segments"][b, i]
                for j in ends]  # fmt: skip
        gram = (number, *(int(tokens[b, j]) if known else None for j, known in zip(ends, same, strict=True)))
        code = int(codes[number, b, i])
        assert rows.setdefault(gram, code) == code
        expected[b, i, number] = model.embedding.ngrams.tables[number][code]
    assert len(set(rows.values())) > 0.99 * len(rows)
    summed = expected.sum(2) if width is None else expected.flatten(2) @ model.embedding.ngrams.projection.weight.T
    torch.testing.assert_close(model.embedding(read, 0, codes), plain.embedding(read, 0) + summed)


def test_ngram_tables_leak_neither_later_tokens_nor_other_documents():
    model = with_tables(build_model(small(("local",), ngrams=NGRAMS, document_separator=255), 3))
    tokens = random_tokens(2, 80, 255)
    tokens[:, 39] = 255
    later, before = tokens.clone(), tokens.clone()
    later[:, 60:], before[:, :39] = random_tokens(2, 20, 255, seed=1), random_tokens(2, 39, 255, seed=2)
    whole, changed, moved = (model.streams(x[:, :-1], RngContext.evaluation(0, 2), padding_of(x, model.config))[0][0]
                             for x in (tokens, later, before))  # fmt: skip
    assert torch.equal(whole[:, :61], changed[:, :61]) and not torch.equal(whole[:, 61:], changed[:, 61:])
    assert torch.equal(whole[:, 40:], moved[:, 40:]) and not torch.equal(whole[:, :40], moved[:, :40])


@pytest.mark.parametrize("kind", ["axial", "sinusoidal", "learned", "rotary"])
def test_positions_tell_order(kind):
    positions = AXIAL if kind == "axial" else PositionsConfig(kind=kind)
    model = build_model(small(("full",), positions=positions), 0)
    tokens = random_tokens(1, 30)
    swapped = tokens.clone()
    swapped[:, [3, 20]] = tokens[:, [20, 3]]
    last = [model.token_scores(x, RngContext.evaluation(0, 1)).nats[0, -1] for x in (tokens, swapped)]
    assert abs(last[0] - last[1]) > 1e-4


@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder_decoder"])
def test_a_model_needs_only_tokens(kind):
    """The draws of evaluation with seed 0: the same in each call, and without dropout."""
    config = small_pair(dropout=0.5) if kind == "encoder_decoder" else small(kind=kind, vocabulary=257, dropout=0.5)
    model, tokens = build_model(config, seed=3).train(), random_tokens(2, 100)
    loss, statistics = model(tokens)
    wanted, _ = model(tokens, RngContext.evaluation(0, 2))
    assert loss == wanted == model(tokens)[0] and statistics["tokens"] > 0
