"""Published Reformers on our batches: what they report beside what strictly causal scoring gives."""

import json
import math

import pytest
import torch

from megasparse.cli.main import door
from megasparse.config.load import load_config
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.runs import peers
from megasparse.runs.peers import PEERS, Peer, compare_peers, score, table
from tests.helpers.commands import refused, run

main = door("bench peers")

SIZES = [
    "model.max_length=128", "data.sequence_length=128", "model.layers=2", "model.d_model=32", "model.d_ff=64",
    "model.heads=2", "model.attention.lsh.chunk=8", "training.steps=2", "evaluation.every=1", "evaluation.sequences=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("The cat sat on the mat, and the dog on the log. " * 400)
    run(door("prepare-data"), "text", "--source", folder / "text.txt", "--output", folder / "text")
    return load_config("pays", [*SIZES, f"data.path={folder / 'text'}"])


class Ours(torch.nn.Module):
    """A strictly causal decoder with LSH, in a peer's clothes."""

    def __init__(self, config):
        super().__init__()
        changes = config.model.model_dump() | {"attention": {"pattern": ["lsh"], "lsh": {"chunk": 8}}}
        self.model = build_model(type(config.model).model_validate(changes), 0).eval()

    def forward(self, tokens):
        padded = torch.nn.functional.pad(tokens, (0, 1))  # ours gives the prediction of a token, not after it
        return self.model.window_logits(padded, RngContext.evaluation(0, 1))[:, 1:]


class NextToken(torch.nn.Module):
    """Knows the token after each that it is given, and nothing of the one after the last."""

    def forward(self, tokens):
        after = torch.nn.functional.one_hot(tokens[:, 1:], 256).float() * 20
        return torch.cat([after, torch.zeros(1, 1, 256)], dim=1)


def test_a_strictly_causal_model_has_no_leak(config):
    found = score(Peer(Ours(config)), config, 12)
    assert abs(found["leak"]) < 1e-5 and found["moved"] == 0


def test_a_model_that_reads_ahead_is_charged_for_what_it_read(config):
    found = score(Peer(NextToken()), config, 12)
    assert found["bits_per_dim"] < 1e-3 and found["whole"] < 1e-3
    assert found["prefix"] == pytest.approx(8) and found["leak"] == pytest.approx(8, abs=1e-3) and found["moved"] == 1


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_trains_on_our_batches_and_its_row_is_kept(config, name, tmp_path, monkeypatch):
    output = tmp_path / "peers.json"
    (row,) = compare_peers(config, [name], [0], [1e-2], 6, output)
    steps = [each["step"] for each in row["curve"]]
    assert steps == [1, 2] and row["curve"][1]["bits_per_dim"] < row["curve"][0]["bits_per_dim"] < 10
    assert row["bits_per_dim"] < 10 and row["positions"] == 6 and math.isfinite(row["standard_error"])
    monkeypatch.setattr(peers, "train", None)  # what is kept is not trained again
    assert compare_peers(config, [name], [0], [1e-2], 6, output) == [row] == json.loads(output.read_text())["rows"]
    assert table([row])[2].startswith(f"| {name} | 0.01 | 0 | 2 |")


def test_wrong_requests_are_one_line(config, tmp_path, capsys):
    words = ["pays", "--json", tmp_path / "peers.json"]
    assert 'there is no "trax"' in refused(capsys, main, *words, "--peers", "trax")
    assert "--rates" in refused(capsys, main, *words, "--rates", "fast")
    sizes = [word for size in (*SIZES, f"data.path={config.data.path}") for word in ("--set", size)]
    shorter = refused(capsys, main, *words, *sizes, "--set", "data.sequence_length=64")
    assert "data.sequence_length: 64 is not model.max_length = 128" in shorter
    longer = ("--set", "model.max_length=8192", "--set", "data.sequence_length=8192")
    assert "validation has" in refused(capsys, main, *words, *sizes, *longer)
    (tmp_path / "peers.json").write_text("{}")
    assert "holds no rows" in refused(capsys, main, *words, *sizes)
