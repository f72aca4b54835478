"""Checkpoints of weights that were not trained here, and runs that start from them."""

import json
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from launch import pretrain
from megasparse.errors import HubError
from megasparse.hub import importing
from megasparse.hub.importing import write_checkpoint
from megasparse.model.build import build_model
from megasparse.settings.load import build_config, load_config
from megasparse.training.checkpoints.checkpoint import Checkpoint, persistent_buffers
from megasparse.training.checkpoints.rank_file import RankFile
from tests.helpers.commands import refused, run
from tests.helpers.tiny import read_metrics
from tests.helpers.trained import prepared

MODEL = {
    "max_length": 64, "layers": 2, "d_model": 16, "d_ff": 32, "heads": 2,
    "attention": {"pattern": ["routing", "local"], "routing": {"chunk": 8}, "local": {"chunk": 8}},
}  # fmt: skip
"""Model with weights that are not parameters: the centroids of routing attention."""


def configured(**changes):
    """A configuration, and the weights of its model."""
    sections = {"model": {**MODEL, **changes}, "data": {"sequence_length": changes.get("max_length", 64)}}
    config = build_config({**sections, "run": {"engine": "torch", "device": "cpu"}})
    model = build_model(config.model, seed=3)
    return config, {**dict(model.named_parameters()), **persistent_buffers(model)}


def readers(weights):
    return {name: lambda value=value: value.detach().clone() for name, value in weights.items()}


def test_it_is_a_checkpoint_of_step_0_with_every_weight_bit_for_bit(tmp_path):
    config, weights = configured()
    path = write_checkpoint(config, readers(weights), tmp_path / "new" / "run")
    assert path == tmp_path / "new" / "run" / "checkpoints" / "00000000"
    opened = Checkpoint.open(path)
    assert (opened.step, opened.sequences, opened.optimizer_steps, opened.state) == (0, 0, 0, {})
    assert opened.config == config == load_config(tmp_path / "new" / "run" / "config.json")
    assert opened.manifest["tensors"].keys() == {"weight"}
    assert opened.manifest["tensors"]["weight"].keys() == weights.keys()
    assert any("centroids" in name for name in weights)
    for name, value in weights.items():
        assert torch.equal(opened.tensor("weight", name).view(torch.int32), value.view(torch.int32)), name
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run"]


def test_one_weight_is_in_memory_at_a_time(tmp_path):
    config, weights = configured()
    alive, most = weakref.WeakSet(), []

    def reader(value):
        def read():
            copy = value.detach().clone()
            alive.add(copy.untyped_storage())
            most.append(len(alive))
            return copy

        return read

    write_checkpoint(config, {name: reader(value) for name, value in weights.items()}, tmp_path / "run")
    assert len(most) == len(weights) and max(most) <= 2  # the last block of the one before is let go of then


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head.norm_bias": None}, "head.norm_bias: a weight of the model, is missing"),
        ({"more": torch.zeros(1)}, "more: is not a weight of the model"),
        ({"head.norm_bias": torch.zeros(3)}, "head.norm_bias: has shape [3], but [32]"),
        ({"head.norm_bias": torch.full((32,), torch.nan)}, "head.norm_bias: contains a number that is not finite"),
    ],
)
def test_weights_of_another_model_leave_nothing(changes, message, tmp_path):
    config, weights = configured()
    found = readers({name: value for name, value in {**weights, **changes}.items() if value is not None})
    with pytest.raises(HubError) as error:
        write_checkpoint(config, found, tmp_path / "run")
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_and_a_folder_that_exists_leave_everything_as_it_was(tmp_path, monkeypatch):
    config, weights = configured()
    (tmp_path / "run").mkdir()
    with pytest.raises(HubError, match="exists already"):
        write_checkpoint(config, readers(weights), tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []

    def full(self, path, progress):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RankFile, "write", full)
    with pytest.raises(HubError, match="No space left"):
        write_checkpoint(config, readers(weights), tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def start(tmp_path, config, *arguments, **sections):
    """Run launch/pretrain.py on synthetic data, 2 steps that are too small to move a weight."""
    if not (tmp_path / "data").exists():
        prepared(tmp_path)
    values = config.model_dump(mode="json")
    changes = {
        "run": {"directory": str(tmp_path / "trained")},
        "data": {"path": str(tmp_path / "data")},
        "training": {"steps": 2, "global_batch": 2},
        "optimizer": {"learning_rate": 1e-30, "betas": [0.5, 0.9]},
        **sections,
    }
    for name, section in changes.items():
        values[name] |= section
    (tmp_path / "config.json").write_text(json.dumps(values))
    run(pretrain, "--config", tmp_path / "config.json", *arguments)


@pytest.mark.parametrize("option", ["--resume", "--start"])
def test_a_run_starts_from_an_import_on_any_data_and_resumes(tmp_path, capsys, option):
    """Step 1 is the first, with new data, another optimizer and another batch; later it resumes from its checkpoint.
    --start allows another attention, whose hash functions are new.
    """
    again, lsh = option == "--start", {"pattern": ["lsh"], "lsh": {"chunk": 8, "shared_qk": False}}
    config, weights = configured(**({"attention": lsh} if again else {}))
    began = write_checkpoint(config, readers(weights), tmp_path / "imported")
    words = [option, began.parents[1] if again else began]
    if again:
        config, _ = configured(attention={"pattern": ["lha"], "lha": {"chunk": 8}})
    start(tmp_path, config, *words)
    message, printed = "new weights: blocks.0.attention.attention.mechanisms.lha.", capsys.readouterr().err
    assert "changed" not in printed and (message in printed) == again
    assert [line["step"] for line in read_metrics(tmp_path / "trained")] == [1, 2]
    trained = Checkpoint.open(tmp_path / "trained" / "checkpoints" / "00000002")
    assert trained.manifest["data_fingerprint"] != "none" and trained.optimizer_steps == 2
    first = Checkpoint.open(tmp_path / "trained" / "start" / "checkpoints" / "00000000" if again else began)
    for name, value in build_model(config.model, 0).named_parameters():
        expected = weights.get(name, value).detach()
        assert torch.equal(first.tensor("weight", name), expected), name
        torch.testing.assert_close(trained.tensor("weight", name), expected, rtol=0, atol=1e-25)
    start(tmp_path, config, *(words if again else []), training={"steps": 3, "global_batch": 2})
    assert (tmp_path / "trained" / "checkpoints" / "00000003").exists()


def test_a_run_of_another_tokenizer_is_rejected(tmp_path, monkeypatch, capsys):
    prepared(tmp_path)
    config, weights = configured()
    other = SimpleNamespace(identity={"name": "words", "sha256": "0"})
    monkeypatch.setattr(importing, "build_tokenizer", lambda name: other)
    path = write_checkpoint(config, readers(weights), tmp_path / "imported")
    message = refused(capsys, lambda words: start(tmp_path, config, *words), "--resume", path)
    assert 'tokenizer.name: "words" -> "bytes"' in message and '"none"' not in message


def test_a_start_that_does_not_fit_leaves_nothing(tmp_path, capsys):
    prepared(tmp_path)
    config, weights = configured()
    path = write_checkpoint(config, readers(weights), tmp_path / "imported")
    for arguments, sections, message in (
        (["--start", path], {"model": {"d_ff": 64}}, "feed_forward.up has shape"),
        (["--start", tmp_path / "nothing"], {}, "nothing"),
        (["--start", path, "--set", 'lora.targets=["query"]'], {"model": {"ngrams": {"rows": 9}}},
         "lacks embedding.ngrams.tables.0, which would keep its initial value"),
        (["--start", path, "--resume", "never"], {}, "--start: cannot be combined with --resume never"),
    ):  # fmt: skip
        program = partial(lambda more, words: start(tmp_path, config, *words, **more), sections)
        assert message in refused(capsys, program, *arguments)
        assert not (tmp_path / "trained" / "start").exists()


@pytest.mark.parametrize("axial", [False, True])
def test_a_longer_model_starts_with_repeated_positions(tmp_path, capsys, axial):
    def of_length(length):
        grid = {"kind": "axial", "axial_shape": [length // 8, 8], "axial_dims": [6, 10]}
        positions = grid if axial else {"kind": "learned"}
        return configured(max_length=length, positions=positions, attention={"pattern": ["local"]})

    config, weights = of_length(24)
    path = write_checkpoint(config, readers(weights), tmp_path / "short")
    longer, _ = of_length(64)
    importing.write_start(longer, path, tmp_path / "long")
    assert "lengthened" in capsys.readouterr().err
    start = Checkpoint.open(tmp_path / "long" / "checkpoints" / "00000000")
    tables = []
    for shape, model, read in ((24, config.model, weights.get), (64, longer.model, partial(start.tensor, "weight"))):
        embedding = build_model(model, 0).embedding
        for name, weight in embedding.positions.named_parameters(prefix="embedding.positions"):
            weight.data.copy_(read(name))
        tables.append(embedding.positions(0, shape, torch.device("cpu")))
    assert torch.equal(tables[1], tables[0][torch.arange(64) % 24])
    with pytest.raises(HubError, match=r"embedding\.positions.* has shape"):
        importing.write_start(config, tmp_path / "long", tmp_path / "shortened")
