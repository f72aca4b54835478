"""Opening checkpoints: every damage is found and named, and the numbers come back whatever pieces they lie in."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from megasparse.errors import CheckpointError
from megasparse.training.checkpoints.checkpoint import Checkpoint, load_weights
from megasparse.training.checkpoints.manifest import MANIFEST, find_newest, seal
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.ranks import Ranks
from tests.helpers.cases import together
from tests.helpers.ranks_in_threads import run_in_threads
from tests.helpers.tiny import DummyBatches, TinyModel, identity_of, tiny_config, tiny_engine

FILES = (MANIFEST, "rank-00000.safetensors", "rank-00001.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks after two steps."""
    config = tiny_config(tmp_path_factory.mktemp("run"))

    def work(ranks: Ranks) -> Path | None:
        engine = tiny_engine(config, ranks)
        for step, data in zip((1, 2), DummyBatches(config, Ranks()), strict=False):  # each rank trains on all
            engine.train_step(data.micro_batches, step, 0.01)
        return Saver(identity_of(config), ranks).save(engine, 2, 16, {})

    path = run_in_threads(work)[0]
    assert isinstance(path, Path), path
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def is_detected(copy: Path, name: str) -> bool:
    """True if opening it raises an error that names the file."""
    try:
        Checkpoint.open(copy)
    except CheckpointError as error:
        return str(error).startswith(f"{copy / name}: ")
    return False


@pytest.mark.parametrize("file", FILES)
def test_one_flipped_bit_is_found_wherever_it_is(copy, file, figures):
    whole = (copy / file).read_bytes()
    generator = torch.Generator().manual_seed(0)
    positions = [0, 7, 8, len(whole) - 1, *torch.randint(len(whole), (60,), generator=generator).tolist()]
    done = detected = 0
    for position in positions:
        for bit in (1, 16, 128):
            (copy / file).write_bytes(whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :])
            done, detected = done + 1, detected + is_detected(copy, file)
    (copy / file).write_bytes(whole)
    Checkpoint.open(copy)
    figures(checkpoint_damages=done, checkpoint_damages_detected=detected)
    assert detected == done


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_cut_or_gone_is_found(copy, file, figures):
    whole = (copy / file).read_bytes()
    detected, lengths = 0, (0, 1, 8, len(whole) // 2, len(whole) - 1)
    for length in lengths:
        (copy / file).write_bytes(whole[:length])
        detected += is_detected(copy, file)
    (copy / file).write_bytes(whole + b"\0")
    detected += is_detected(copy, file)
    (copy / file).unlink()
    detected += is_detected(copy, file)
    with pytest.raises(CheckpointError, match=f"{file}: missing"):
        Checkpoint.open(copy)
    figures(checkpoint_damages=len(lengths) + 2, checkpoint_damages_detected=detected)
    assert detected == len(lengths) + 2


def test_each_of_two_ranks_verifies_half_of_the_files(copy):
    for rank, name in enumerate(FILES[1:]):
        whole = (copy / name).read_bytes()
        (copy / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        Checkpoint.open(copy, 1 - rank, 2)
        with pytest.raises(CheckpointError, match=f"{name}: changed since"):
            Checkpoint.open(copy, rank, 2)
        (copy / name).write_bytes(whole)


@pytest.mark.parametrize("name", ["rank-00002.safetensors", "model.pt", ".hidden", "folder"])
def test_a_file_too_many_is_found(copy, name):
    (copy / name).mkdir() if name == "folder" else (copy / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{name}: not part of this checkpoint"):
        Checkpoint.open(copy)


def test_only_regular_files_are_read(copy):
    for name in FILES:
        (copy / name).rename(copy.parent / name)
        (copy / name).symlink_to(copy.parent / name)
        assert is_detected(copy, name)
        (copy / name).unlink()
        os.mkfifo(copy / name)  # opening it would wait for ever
        assert is_detected(copy, name)
        (copy / name).unlink()
        (copy.parent / name).rename(copy / name)
    Checkpoint.open(copy)


def test_another_steps_checkpoint_under_this_name_is_found(copy):
    copy.rename(copy.parent / "00000007")
    with pytest.raises(CheckpointError, match=r"00000007: is the checkpoint of step 2"):
        Checkpoint.open(copy.parent / "00000007")
    (copy.parent / "00000007").rename(copy.parent / "best")
    assert Checkpoint.open(copy.parent / "best").step == 2


def norm(manifest: dict, name: str = "weight") -> dict:
    return manifest["tensors"]["weight"][f"norm.{name}"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.update(format=2), "format 2, this version of megasparse reads 1"),
        (
            lambda m: m["files"].update({"../outside": {"bytes": 0, "sha256": ""}}),
            "files.*outside.*should match",
        ),
        (lambda m: m["config"]["model"].update(wings=2), "model.wings"),
        (lambda m: norm(m)["pieces"].clear(), r"weight of norm.weight: 0 numbers for the shape \[13\]"),
        (lambda m: norm(m)["pieces"][0].update(start=-5), r"norm.weight.pieces.0.start: Input should be greater"),
        (lambda m: norm(m).update(pieces=norm(m, "bias")["pieces"]), r"twice"),
        (lambda m: norm(m)["pieces"][0].update(file="/etc/passwd"), r"a piece in a file '/etc/passwd'"),
        (lambda m: m.pop("tensors"), r"tensors: Field required"),
    ],
)
def test_a_manifest_of_another_making_is_rejected(copy, edit, message):
    manifest = json.loads((copy / MANIFEST).read_text())
    edit(manifest)
    (copy / MANIFEST).write_text(seal(manifest))
    with pytest.raises(CheckpointError, match=message):
        opened = Checkpoint.open(copy)
        assert opened.config
        load_weights(TinyModel(), opened)


def test_any_part_of_a_tensor_can_be_read(saved):
    checkpoint, model = Checkpoint.open(saved), TinyModel(seed=1)
    load_weights(model, checkpoint)
    for name, parameter in model.named_parameters():
        flat = checkpoint.tensor("weight", name).view(-1)
        assert torch.equal(flat, parameter.detach().view(-1))
        for start, numel in ((0, 1), (flat.numel() // 3, flat.numel() // 2), (flat.numel() - 1, 1), (3, 0)):
            assert torch.equal(checkpoint.read("weight", name, start, numel), flat[start : start + numel])
    assert not torch.equal(checkpoint.tensor("exp_avg", "out.bias"), torch.zeros(256))
    with pytest.raises(CheckpointError, match=r"momentum of out.bias is missing"):
        checkpoint.tensor("momentum", "out.bias")


def test_the_newest_is_the_highest_step(tmp_path):
    assert find_newest(tmp_path / "nowhere") is None
    for name in ("00000009", "00000010", "123456789", ".tmp-00000300-a", "set-aside-00000400", "00000500.txt", "notes"):
        (tmp_path / name).mkdir()
    assert find_newest(tmp_path) == tmp_path / "123456789"
    (tmp_path / "123456789").rename(tmp_path / "away")
    assert find_newest(tmp_path) == tmp_path / "00000010"


@together(
    ("make", "message"),
    [
        (lambda path: None, "00000001: no such checkpoint"),
        (Path.mkdir, "00000001/manifest.json: missing"),
        (Path.touch, "00000001: not a folder"),
        (lambda path: path.symlink_to(path.parent), "00000001: is a symbolic link"),
    ],
)
def test_a_folder_without_a_checkpoint_is_rejected(tmp_path, make, message):
    make(tmp_path / "00000001")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path / "00000001")
