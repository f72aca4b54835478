"""An encoder–decoder's scores of its targets, against sums by hand."""

import json
import math

import pytest
import torch

from launch import evaluate as launcher
from megasparse.cli.main import door
from megasparse.config.schema import Config
from megasparse.evaluation.results import evaluate_predictions as evaluate
from megasparse.evaluation.results import prediction_summary as summary
from megasparse.model.build import build_model
from megasparse.ops.random import EVALUATION_STEP, RngContext
from megasparse.training.ranks import Ranks
from tests.helpers.commands import run
from tests.helpers.models import small
from tests.helpers.scoring import Stream, protocol_with, write_uniform

prepare_data = door("prepare-data")

PADDING, SOURCE, TARGET = 256, 6, 8


@pytest.fixture(scope="module")
def model():
    source = {"length": SOURCE, "positions": {"kind": "sinusoidal"}}
    ids = {"vocabulary": 260, "padding_token": PADDING, "label_smoothing": 0.1}
    model = build_model(small(("lsh",), layers=1, kind="encoder_decoder", source=source, **ids), 0).eval()
    with torch.no_grad():
        model.head.norm_bias += 0.3
        model.head.weight[259] += 0.3  # often the likeliest: that there is something to be right about
    return model


def records(count: int) -> list[list[int]]:
    """Sources and targets of several lengths, each ended by 259, and padded."""
    found = []
    for number in range(count):
        source, target = [[10 * number + i for i in range(n)] + [259] for n in (number % 5, (3 * number) % 7)]
        found.append(source + [PADDING] * (SOURCE - len(source)) + target + [PADDING] * (TARGET - len(target)))
    return found


def test_only_targets_are_scored(model):
    data = records(7)
    stream = Stream([token for record in data for token in record])
    settings = protocol_with("bytes", sequence_length=14, stride=14, record=14, rounds=None, seeds=[3, 4])
    found = evaluate(model, stream, settings, batch=3, limit=None, ranks=Ranks())
    count, sums, correct = sum(token != PADDING for record in data for token in record[SOURCE:]), [], 0
    for seed in (3, 4):
        total = 0.0
        for start, record in zip(range(0, 98, 14), data, strict=True):
            rng = RngContext(seed, EVALUATION_STEP, torch.tensor([start]), training=False)
            scores = model.token_scores(torch.tensor([record]), rng)
            scored = [place for place in range(SOURCE, 14) if record[place] != PADDING]
            total += math.fsum(float(scores.nats[0, place]) for place in scored)
            correct += sum(bool(scores.correct[0, place]) for place in scored)
        sums.append(total)
    assert found["dims"] == count and sums[0] != sums[1]
    assert found["nats"] == pytest.approx(sum(sums) / 2, rel=1e-6)
    assert found["loss"] == pytest.approx(sum(sums) / 2 / count, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["accuracy"] == correct / 2 / count > 0
    assert found["standard_deviation"] == pytest.approx(abs(sums[0] - sums[1]) / count / math.sqrt(2), rel=1e-3)
    assert found["protocol"]["source_length"] == SOURCE and found["protocol"]["leaks"] == []
    assert f"{found['loss']:.4f} nats per target token, perplexity {found['perplexity']:.3f}, " in summary(found)
    one = evaluate(model, stream, protocol_with("bytes", sequence_length=14, stride=14, seeds=[3]), 1, 2, Ranks())
    assert one["standard_deviation"] is None
    assert one["dims"] == sum(token != PADDING for record in data[:2] for token in record[SOURCE:])


def test_from_translations_to_a_result(tmp_path, capsys):
    for name, lines in {"en": ["one", "two", "six"], "de": ["eins", "zwei", "sechs"]}.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    files = ["--source", str(tmp_path / "en"), "--target", str(tmp_path / "de"), "--split", "100,0,0"]
    lengths = ["--source-length", "6", "--target-length", "8", "--workers", "1"]
    prepare_data(["parallel", "--output", str(tmp_path / "data"), *files, *lengths])
    source = {"length": 6, "attention": {"pattern": ["full"]}}
    sizes = {"layers": 1, "kind": "encoder_decoder", "vocabulary": 260, "padding_token": 257}
    config = small(("full",), **sizes, source=source)
    data = {"path": str(tmp_path / "data"), "sequence_length": 14}
    whole = Config.model_validate({"model": config.model_dump(), "data": data, "run": {"device": "cpu"}})
    write_uniform(whole, tmp_path / "run")
    run(launcher, "--checkpoint", tmp_path / "run", "--split", "train", "--json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["dims"] == len("eins zwei sechs") - 2 + 3  # each target's end is predicted too
    assert found["perplexity"] == pytest.approx(260, rel=1e-5)
    assert "5.5607 nats per target token, perplexity 260.000, accuracy" in capsys.readouterr().out
