"""From a trained checkpoint to numbers and text, by the commands that a user types."""

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import evaluate, generate, pretrain
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.evaluation.results import restore
from megasparse.ops.random import EVALUATION_STEP, RngContext
from tests.helpers.commands import refused, run
from tests.helpers.scoring import likeliest
from tests.helpers.tiny import read_metrics
from tests.helpers.trained import prepare_text

MODEL = {
    **{"max_length": 64, "layers": 2, "d_model": 32, "d_ff": 64, "heads": 4},
    "attention": {"pattern": ["local", "lsh"], "local": {"chunk": 16}, "lsh": {"chunk": 8, "rounds": 1}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of data/, a tenth of it for testing. Three steps each: run/, leaky/ (its window), encoder/."""
    folder = tmp_path_factory.mktemp("launchers")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(50)]
    (folder / "source.txt").write_text(" ".join(draw.choices(words, k=1500)))
    prepare_text(folder / "source.txt", folder / "data")
    for name in ("run", "leaky", "encoder"):
        config: dict[str, dict[str, Any]] = {
            "run": {"directory": str(folder / name), "engine": "torch", "device": "cpu"},
            "model": copy.deepcopy(MODEL),
            "data": {"path": str(folder / "data"), "sequence_length": 64},
            "training": {"steps": 3, "global_batch": 2, "micro_batch": 2},
            "optimizer": {"learning_rate": 0.02},  # enough to learn which letter is the most frequent
            "checkpoint": {"every": 2},
            "evaluation": {"every": 2, "sequences": 2, "sample_tokens": 4},
        }
        if name == "leaky":
            config["model"]["attention"]["lsh"]["window"] = "chunk"
        if name == "encoder":
            config["model"] |= {"kind": "encoder", "vocabulary": 257}
            config["evaluation"]["sample_tokens"] = 0
        (folder / f"{name}.json").write_text(json.dumps(config))
        run(pretrain, "--config", folder / f"{name}.json")
    return folder


def by_hand(folder: Path, rounds: int, seed: int = 0) -> tuple[float, int]:
    """Nats of the test split in windows of 64 from the start vector, one at a time; how many were the likeliest."""
    decoder, *_ = restore(folder / "run")
    stream = EvaluationStream(Index.load(folder / "data"), "test")
    tokens = stream.read(0, stream.tokens)
    pieces = [tokens[None, i : i + 64] for i in range(0, len(tokens), 64)]
    scores = [decoder.token_scores(piece, RngContext.evaluation(seed, 1, rounds)) for piece in pieces]
    return math.fsum(float(s.nats.double().sum()) for s in scores), sum(int(s.correct.sum()) for s in scores)


def test_evaluate_writes_the_number_with_its_protocol(folder, capsys):
    out = folder / "out" / "test.json"
    run(evaluate, "--checkpoint", folder / "run", "--data", folder / "data", "--json", out, "--batch", 5)
    found, index = json.loads(out.read_text()), Index.load(folder / "data")
    dims = index.split("test").tokens
    assert (found["dims"], found["bytes"]) == (dims, dims)
    nats, correct = by_hand(folder, rounds=1)
    assert found["nats"] == pytest.approx(nats, rel=1e-6)
    assert found["accuracy"] == correct / dims > 0
    assert found["bits_per_dim"] == pytest.approx(found["nats"] / dims / math.log(2), rel=1e-12)
    protocol = found["protocol"]
    assert protocol["checkpoint_step"] == 3
    assert protocol["data_fingerprint"] == protocol["trained_on_fingerprint"] == index.fingerprint
    wanted = {"split": "test", "sequence_length": 64, "stride": 64, "rounds": None, "seeds": [0], "leaks": []}
    assert protocol | wanted | {"configured_rounds": {"lsh": 1}} == protocol
    assert f"{found['bits_per_dim']:.4f} bits/dim, accuracy {100 * found['accuracy']:.2f} %" in capsys.readouterr().out


def test_rounds_seeds_stride_limit_and_overrides_reach_the_model(folder):
    out = folder / "out" / "options.json"
    common = ["--checkpoint", folder / "run" / "checkpoints", "--data", folder / "data", "--json", out]
    run(evaluate, *common, "--rounds", 3, "--hash-seeds", 2, "--set", "run.seed=5")
    found = json.loads(out.read_text())
    assert found["nats"] == pytest.approx(sum(by_hand(folder, 3, seed=seed)[0] for seed in (5, 6)) / 2, rel=1e-6)
    assert found["protocol"]["seeds"] == [5, 6]
    assert found["standard_deviation"] > 0
    run(evaluate, *common, "--limit", 2, "--stride", 16, "--split", "validation")
    found = json.loads(out.read_text())
    assert (found["dims"], found["protocol"]["stride"]) == (80, 16)


def test_a_leaking_model_is_scored_only_when_asked_for(folder, capsys):
    arguments = ["--checkpoint", folder / "leaky", "--data", folder / "data", "--json", folder / "leaky.out"]
    assert "not strictly causal" in refused(capsys, evaluate, *arguments)
    run(evaluate, *arguments, "--allow-leaking-attention", "--limit", 1)
    assert len(json.loads((folder / "leaky.out").read_text())["protocol"]["leaks"]) == 1
    assert "not strictly causal" in refused(capsys, generate, "--checkpoint", folder / "leaky", "--tokens", 3)


def test_greedy_text_is_the_whole_sequence_models_choice(folder, capsys):
    run(generate, "--checkpoint", folder / "run", "--prompt", "abc é", "--tokens", 14, "--temperature", 0)
    decoder, *_ = restore(folder / "run")
    tokens = list("abc é".encode())
    for _ in range(14):  # beyond a window of each layer
        tokens.append(likeliest(decoder, tokens))
    assert capsys.readouterr().out == bytes(tokens).decode(errors="replace") + "\n"


def test_mistakes_are_one_line(folder, capsys, tmp_path):
    long = refused(capsys, generate, "--checkpoint", folder / "run", "--prompt", "x" * 60, "--tokens", 5)
    assert "--tokens: a prompt of 60 tokens and 5 new tokens exceed model.max_length = 64" in long
    assert "contains no checkpoint" in refused(capsys, evaluate, "--checkpoint", tmp_path, "--data", folder / "data")
    there = ["--checkpoint", folder / "run"]
    assert "no data here" in refused(capsys, evaluate, *there, "--data", tmp_path)
    assert 'no split "tst"' in refused(capsys, evaluate, *there, "--data", folder / "data", "--split", "tst")
    assert "belongs to another model" in refused(capsys, evaluate, *there, "--set", "model.layers=3")
    message = refused(capsys, generate, "--checkpoint", folder / "encoder", "--tokens", 3)
    assert "an encoder cannot generate text" in message
    assert "d_ff" not in refused(capsys, evaluate, *there, "--set", "model.d_modl=3")


@pytest.mark.parametrize("trained_on", [64, 32])
def test_training_logged_its_held_out_evaluation(folder, trained_on):
    path = folder / "run"
    if trained_on == 32:  # evaluated in windows of 64 too
        path = folder / "short"
        lengths = ["--set", "data.sequence_length=32", "--set", "evaluation.sequence_length=64"]
        run(pretrain, "--config", folder / "run.json", "--set", f"run.directory={path}", *lengths)
    lines = read_metrics(path)
    assert ["evaluation/bits_per_dim" in line for line in lines] == [False, True, False]
    assert lines[1]["evaluation/bits_per_dim"] == pytest.approx(lines[1]["evaluation/loss"] / math.log(2))
    there = ["--checkpoint", path / "checkpoints" / "00000002", "--data", folder / "data"]
    run(evaluate, *there, "--split", "validation", "--limit", 2, "--json", folder / "step_2.json")
    found = json.loads((folder / "step_2.json").read_text())
    assert (found["dims"], found["protocol"]["sequence_length"]) == (128, 64)
    for name in ("bits_per_dim", "accuracy"):
        assert found[name] == pytest.approx(lines[1][f"evaluation/{name}"], rel=1e-6)


def test_an_encoder_is_scored_on_the_tokens_it_masks(folder, capsys):
    out = folder / "encoder.out"
    arguments = ["--checkpoint", folder / "encoder", "--data", folder / "data", "--json", out]
    run(evaluate, *arguments, "--batch", 5)
    found = json.loads(out.read_text())
    model, *_ = restore(folder / "encoder")
    stream = EvaluationStream(Index.load(folder / "data"), "test")
    nats, correct, masked = [], 0, 0
    for start in range(0, stream.tokens, 64):  # a window's masks depend on where it starts, not on its batch
        tokens = stream.read(start, min(start + 64, stream.tokens))[None]
        scores = model.token_scores(tokens, RngContext(0, EVALUATION_STEP, torch.tensor([start]), training=False))
        nats.append(float(scores.nats[scores.scored].double().sum()))
        correct += int(scores.correct[scores.scored].sum())
        masked += int(scores.scored.sum())
    assert found["dims"] == masked == pytest.approx(0.15 * stream.tokens, rel=0.06)
    assert found["nats"] == pytest.approx(math.fsum(nats), rel=1e-6)
    assert found["loss"] == pytest.approx(found["nats"] / masked)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["accuracy"] == correct / masked
    assert "bits_per_dim" not in found
    assert found["protocol"]["masking"] == {"rate": 0.15, "token": 256, "whole_words": False}
    line = f"{found['loss']:.4f} nats per masked token, perplexity {found['perplexity']:.3f}, accuracy "
    assert line in capsys.readouterr().out
    run(evaluate, *arguments, "--hash-seeds", 2)
    both = json.loads(out.read_text())
    assert both["dims"] == 2 * masked and both["standard_deviation"] > 0
