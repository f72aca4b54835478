"""Images and translations by the commands that a user types, from models trained for three steps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launch import generate, pretrain
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.evaluation.results import restore
from megasparse.ops.random import RngContext
from tests.helpers.commands import refused, run
from tests.helpers.scoring import likeliest
from tests.helpers.tiny import read_metrics
from tools import prepare_data

MODEL = {"layers": 2, "d_model": 32, "d_ff": 64, "heads": 4, "attention": {"pattern": ["local", "lsh"]}}
SMALL = {"local": {"chunk": 8}, "lsh": {"chunk": 8}}


def trained(folder: Path, corpus: list[Any], length: int, sections: dict[str, Any]) -> Path:
    """A run of 3 steps on a corpus, as tools/prepare_data.py makes it, evaluated after the third."""
    prepare_data.main([*map(str, corpus), "--output", str(folder / "data")])
    config: dict[str, Any] = {
        "run": {"directory": str(folder / "run"), "engine": "torch", "device": "cpu"},
        "model": {**MODEL, "attention": MODEL["attention"] | SMALL},
        "data": {"path": str(folder / "data"), "sequence_length": length},
        "training": {"steps": 3, "global_batch": 2, "micro_batch": 2},
        "evaluation": {"every": 3, "sequences": 2},
    }
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section
    (folder / "run.json").write_text(json.dumps(config))
    run(pretrain, "--config", folder / "run.json")
    return folder / "run"


@pytest.fixture(scope="module")
def pixels(tmp_path_factory):
    """A model of images of 4×4."""
    folder = tmp_path_factory.mktemp("pixels")
    (folder / "source").mkdir()
    draw = np.random.default_rng(0)
    for number in range(40):
        Image.fromarray(draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(folder / "source" / f"{number:02}.png")
    sections = {
        "model": {"max_length": 48},
        "data": {"tokenizer": "pixels"},
        "evaluation": {"every": 3, "sequences": 2, "sample_tokens": 30},
    }
    return trained(folder, ["images", "--source", folder / "source", "--size", 4], 48, sections)


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """An encoder–decoder that predicts the numbers after those that it reads."""
    folder = tmp_path_factory.mktemp("translator")
    numbers = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"] * 20
    for name, first in (("source", 0), ("target", 2)):
        pairs = zip(numbers[first:], numbers[first + 1 :], strict=False)
        (folder / name).write_text("".join(f"{a} {b}\n" for a, b in pairs))
    (folder / "source").write_text("\n".join((folder / "source").read_text().split("\n")[:-3]) + "\n")
    sections = {
        "model": {
            **{"kind": "encoder_decoder", "vocabulary": 260, "max_length": 24, "padding_token": 257},
            "source": {"length": 16, "attention": {"pattern": ["full"]}},
        },
        "optimizer": {"learning_rate": 0.01},
    }
    files = ["--source", folder / "source", "--target", folder / "target", "--split", "80,10,10"]
    return trained(folder, ["parallel", *files, "--source-length", 16, "--target-length", 24], 40, sections)


def opened(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_lower_halves_are_the_whole_sequence_models_choice(pixels, tmp_path):
    original = sorted((pixels.parent / "source").iterdir())[3]
    run(generate, "--checkpoint", pixels, "--complete", original, "--temperature", 0, "--output", tmp_path / "out")
    decoder, *_ = restore(pixels)
    tokens = opened(original).flatten().tolist()[:24]
    for _ in range(10):
        tokens.append(likeliest(decoder, tokens))
    assert opened(tmp_path / "out" / "0000_03.png").flatten().tolist()[:34] == tokens


def test_samples_of_pixels_are_pictures_on_the_board(pixels):
    board = EventAccumulator(str(pixels / "tensorboard"))
    board.Reload()
    (event,) = board.Images("evaluation/sample")
    assert (event.step, event.width, event.height) == (3, 4, 4)
    line = read_metrics(pixels)[-1]
    assert line["evaluation/bits_per_dim"] > 0 and "evaluation/sample" not in line


@pytest.mark.parametrize("options", [["--temperature", 0], ["--beams", 1], ["--beams", 3, "--length-penalty", 0.6]])
def test_a_text_is_written_for_each_source(translator, tmp_path, capsys, options):
    (tmp_path / "sources").write_text("two three\nsix\n")
    run(generate, "--checkpoint", translator, "--tokens", 6, "--source-file", tmp_path / "sources", *options)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    run(generate, "--checkpoint", translator, "--tokens", 6, "--source", "two three", *options)
    assert capsys.readouterr().out.splitlines() == lines[:1]
    if options[1] != 3:
        assert lines[0].encode() == greedy(translator, b"two three")


def greedy(run_: Path, source: bytes) -> bytes:
    """Token by token, by whole passes."""
    model, *_ = restore(run_)
    read, predicted = [*source, 259, *[257] * (15 - len(source))], list[int]()
    while len(predicted) < 6 and (token := likeliest(model, [*read, *predicted], [*range(256), 259])) != 259:
        predicted.append(token)
    return bytes(predicted)


def test_training_reports_how_well_targets_are_predicted(translator):
    line = read_metrics(translator)[-1]
    assert "evaluation/bits_per_dim" not in line
    stream = EvaluationStream(Index.load(translator.parent / "data"), "validation")
    model, *_ = restore(translator)
    nats, correct, scored = torch.tensor(0.0, dtype=torch.float64), 0, 0
    for start in (0, 40):
        record = stream.read(start, start + 40)
        scores = model.token_scores(record[None], RngContext.evaluation(0, 1))
        assert scores.scored[0].tolist() == [False] * 16 + (record[16:] != 257).tolist()
        scored += int(scores.scored.sum())
        nats += scores.nats[scores.scored].double().sum()
        correct += int((scores.correct & scores.scored).sum())
    assert line["evaluation/loss"] == pytest.approx(float(nats) / scored, rel=1e-5)
    assert line["evaluation/accuracy"] == pytest.approx(correct / scored)


def test_mistakes_are_one_line(pixels, translator, tmp_path, capsys):
    other = refused(capsys, generate, "--checkpoint", pixels, "--set", "data.tokenizer=bytes")
    assert 'data.tokenizer: "bytes" (sha256' in other and 'the checkpoint was trained with "pixels" (sha256' in other
    there, out = ["--checkpoint", pixels], ["--output", tmp_path / "out"]
    assert "the model predicts pixels" in refused(capsys, generate, *there, "--tokens", 3)
    assert "--temperature: -1.0" in refused(capsys, generate, *there, "--images", 1, "--temperature", -1, *out)
    big = tmp_path / "big.png"
    Image.fromarray(np.zeros((5, 6, 3), dtype=np.uint8)).save(big)
    assert "big.png: this image has 6×5 pixels" in refused(capsys, generate, *there, "--complete", big, *out)
    assert not (tmp_path / "out").exists()
    assert "--beams: not supported for images" in refused(capsys, generate, *there, "--images", 1, "--beams", 2, *out)
    assert "--length-penalty: not" in refused(capsys, generate, *there, "--images", 1, "--length-penalty", 2, *out)
    there = ["--checkpoint", translator]
    assert "does not predict pixels" in refused(capsys, generate, *there, "--images", 1, *out)
    assert "--output: not supported for text" in refused(capsys, generate, *there, "--source", "x", *out)
    assert "--beams: 0" in refused(capsys, generate, *there, "--source", "x", "--beams", 0)
    for seed in (1 << 64, "9" * 5000, -1, "x", "٣"):
        with pytest.raises(SystemExit):
            generate.main([*map(str, there), "--seed", str(seed)])
        assert "--seed: " in (said := capsys.readouterr().err) and "is not a whole number of 0 or more" in said
    assert "nothing.txt: no such file" in refused(capsys, generate, *there, "--source-file", tmp_path / "nothing.txt")
