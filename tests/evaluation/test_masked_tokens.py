"""An encoder's evaluation of masked tokens and sentence order."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megasparse.config.schema import Config, DataConfig
from megasparse.evaluation import results
from megasparse.evaluation.held_out import HeldOut
from megasparse.ops.random import RngContext
from megasparse.training.ranks import Ranks, RunHooks
from tests.helpers.scoring import Stream, protocol_with
from tests.model.test_encoder import pairs
from tests.model.test_sentence_order import BERT, encoder

LENGTH = 30


def protocol(seeds: list[int]):
    """A protocol whose windows are records."""
    return protocol_with("bytes", sequence_length=LENGTH, stride=LENGTH, seeds=seeds)


def test_sentence_order_is_reported_with_its_loss_accuracy_and_pairs():
    model, records = encoder(layers=1, **BERT), pairs(7, LENGTH)
    result = results.evaluate_predictions(model, Stream(records), protocol([0, 1]), 3, None, Ranks())
    nats, correct = [], []
    for seed in (0, 1):
        rng = dataclasses.replace(RngContext.evaluation(seed, 7), samples=torch.arange(7) * LENGTH)
        scores = model.sentence_order_scores(records, rng)
        nats, correct = [*nats, *scores.nats.tolist()], [*correct, *scores.correct.tolist()]
    order = result["sentence_order"]
    assert order["pairs"] == 14 and order["accuracy"] == pytest.approx(sum(correct) / 14)
    assert order["loss"] == pytest.approx(sum(nats) / 14, rel=1e-5)
    line = results.prediction_summary(result)
    assert f"sentence order: {order['loss']:.4f} nats per pair" in line and "(14 pairs)" in line


def test_the_evaluation_inside_training_equals_a_checkpoint():
    model, stream = encoder(layers=1, **BERT), Stream(pairs(7, LENGTH))
    config = Config(model=model.config).model_copy(update={"data": DataConfig(sequence_length=LENGTH)})
    engine = SimpleNamespace(module=model, ranks=Ranks(), evaluate=model)
    found = HeldOut(engine, config, RunHooks(), stream, None, None)._losses()
    result = results.evaluate_predictions(model.eval(), stream, protocol([0]), 3, config.evaluation.sequences, Ranks())
    order = result["sentence_order"]
    assert found["evaluation/loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert found["evaluation/sentence_order_nats"] == pytest.approx(order["loss"], rel=1e-5)
    assert found["evaluation/sentence_order_accuracy"] == order["accuracy"]


def test_without_sentence_order_the_result_omits_it():
    model = encoder(layers=1, sentence_order=None, **BERT)
    result = results.evaluate_predictions(model, Stream(pairs(4, LENGTH)), protocol([0]), 2, None, Ranks())
    assert "sentence_order" not in result and "sentence order" not in results.prediction_summary(result)
