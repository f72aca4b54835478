"""The command itself: longer inputs for a trained encoder, training that goes on, and what it refuses."""

import json
import math

import pytest
import torch

from launch import pretrain
from megasparse.cli.main import door
from megasparse.evaluation.restore import restore
from megasparse.ops.random import RngContext
from megasparse.training.checkpoints.checkpoint import Checkpoint
from tests.helpers import commands
from tests.helpers.commands import refused
from tests.helpers.models import random_tokens
from tests.helpers.tiny import read_metrics
from tests.helpers.trained import prepared, trained

main = door("extend-positions")

YOSO = {"hashes": 4, "code_bits": 4}
MODEL = {
    "kind": "encoder", "style": "bert", "vocabulary": 257, "max_length": 32, "layers": 2, "d_model": 32, "d_ff": 64,
    "heads": 4, "blocks": "ordinary", "activations": "stored", "tied_embeddings": True,
    "positions": {"kind": "learned", "offset": 2}, "attention": {"pattern": ["full", "yoso"], "yoso": YOSO},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of shards, and of a run of 3 steps."""
    folder = tmp_path_factory.mktemp("short")
    data = prepared(folder)
    full = {**MODEL, "attention": {"pattern": ["full"]}}
    for name, model in (("run", MODEL), ("full", full)):
        trained(data, folder / name, [], 3, model=model, data={"path": str(data), "sequence_length": 32})
    return folder


def test_longer_sequences_are_trained_on(run, tmp_path):
    longer = ["--max-length", 128, "--set", "model.attention.yoso.code_bits=6", "--output", tmp_path / "longer"]
    commands.run(main, "--checkpoint", run / "run", *longer)
    written = tmp_path / "longer" / "checkpoints" / "00000000"
    before, after = Checkpoint.open(run / "run" / "checkpoints" / "00000003"), Checkpoint.open(written)
    table = "embedding.positions.table"
    for name in before.manifest["tensors"]["weight"]:
        old, new = before.tensor("weight", name), after.tensor("weight", name)
        if name == table:
            assert old.shape == (34, 32) and torch.equal(new, torch.cat([old[:2], *[old[2:]] * 4]))
        else:
            assert torch.equal(new, old)
    # As configs/yoso_bert_4096.json does: a file of its own, with a longer model and other settings of training.
    model = {**MODEL, "max_length": 128, "attention": {"pattern": ["full", "yoso"], "yoso": {**YOSO, "code_bits": 6}}}
    config = {
        "run": {"directory": str(tmp_path / "next"), "engine": "torch", "device": "cpu"},
        "model": model,
        "data": {"path": str(run / "data"), "sequence_length": 128},
        "training": {"steps": 2, "global_batch": 4, "micro_batch": 2},
        "optimizer": {"learning_rate": 1e-3},
    }
    (tmp_path / "next.json").write_text(json.dumps(config))
    commands.run(pretrain, "--config", tmp_path / "next.json", "--resume", written)
    lines = read_metrics(tmp_path / "next")
    assert len(lines) == 2 and all(math.isfinite(line["train/loss"]) for line in lines)


def test_short_sequences_give_the_same_outputs(run, tmp_path):
    main(["--checkpoint", str(run / "full"), "--max-length", "70", "--output", str(tmp_path / "longer")])
    tokens = random_tokens(3, 32)
    found = []
    for folder in (run / "full", tmp_path / "longer"):
        model = restore(folder)[0]
        found.append((model, model.token_scores(tokens, RngContext.evaluation(0, 3))))
    (_, short), (longer, same) = found
    assert longer.config.max_length == 70
    assert torch.equal(short.nats, same.nats) and torch.equal(short.scored, same.scored)


@pytest.mark.parametrize(
    ("length", "positions", "reported"),
    [
        ("32", None, "--max-length: 32 is no more than the 32"),
        ("64", {"kind": "axial", "axial_shape": [4, 8], "axial_dims": [16, 16]}, '"axial" cannot be extended'),
        ("64", {"kind": "rotary"}, '"rotary" cannot be extended'),
    ],
)
def test_what_cannot_be_extended_is_one_line(run, tmp_path, capsys, length, positions, reported):
    folder = run / "run"
    if positions:
        folder = tmp_path / "run"
        model = {**MODEL, "layers": 1, "attention": {"pattern": ["full"]}, "positions": positions}
        trained(run / "data", folder, [], 1, model=model, data={"path": str(run / "data"), "sequence_length": 32})
    options = ("--checkpoint", folder, "--max-length", length, "--output", tmp_path / "out")
    assert reported in refused(capsys, main, *options) and not (tmp_path / "out").exists()
