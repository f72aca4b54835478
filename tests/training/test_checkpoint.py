"""Opening checkpoints: every damage is found and named, and the numbers come back whatever pieces they lie in."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megasparse.errors import CheckpointError
from megasparse.training.checkpoint import MANIFEST, Checkpoint, load_weights, seal
from megasparse.training.engine import build_engine
from megasparse.training.ranks import Ranks
from megasparse.training.run_folder import find_newest
from megasparse.training.saving import Saver
from tests.helpers.tiny import MadeUpBatches, TinyModel, make_draws, tiny_config

FILES = (MANIFEST, "rank-00000.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after two steps."""
    config = tiny_config(tmp_path_factory.mktemp("run"))
    engine = build_engine(TinyModel(), config, make_draws, Ranks())
    for step, data in zip((1, 2), MadeUpBatches(config, Ranks()), strict=False):
        engine.train_step(data.micro_batches, step, 0.01)
    return Saver(config, Ranks(), "data", {}).save(engine, 2, 16)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


@pytest.mark.parametrize("file", FILES)
def test_one_flipped_bit_is_found_wherever_it_is(copy: Path, file: str) -> None:
    whole = (copy / file).read_bytes()
    generator = torch.Generator().manual_seed(0)
    places = [0, 7, 8, len(whole) - 1, *torch.randint(len(whole), (60,), generator=generator).tolist()]
    for place in places:
        for bit in (1, 16, 128):
            (copy / file).write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with pytest.raises(CheckpointError, match=file):
                Checkpoint.open(copy)
    (copy / file).write_bytes(whole)
    Checkpoint.open(copy)


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_cut_or_gone_is_found(copy: Path, file: str) -> None:
    whole = (copy / file).read_bytes()
    for length in (0, 1, 8, len(whole) // 2, len(whole) - 1):
        (copy / file).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=file):
            Checkpoint.open(copy)
    (copy / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file}: missing"):
        Checkpoint.open(copy)


def test_a_file_too_many_is_found(copy: Path) -> None:
    (copy / "rank-00001.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors: not part of this checkpoint"):
        Checkpoint.open(copy)


def edit_format(manifest: dict) -> None:
    manifest["format"] = 2


def edit_file_name(manifest: dict) -> None:
    manifest["files"]["../outside"] = {"bytes": 0, "sha256": ""}


def edit_config(manifest: dict) -> None:
    manifest["config"]["model"]["wings"] = 2


def edit_pieces(manifest: dict) -> None:
    manifest["tensors"]["weight"]["norm.weight"]["pieces"].clear()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edit_format, "format 2, this version of megasparse reads 1"),
        (edit_file_name, "names a file '../outside'"),
        (edit_config, "model.wings"),
        (edit_pieces, "has 0 of 13 numbers of weight of norm.weight"),
    ],
)
def test_a_manifest_of_another_making_is_refused(copy: Path, edit: Callable[[dict], None], message: str) -> None:
    manifest = json.loads((copy / MANIFEST).read_text())
    edit(manifest)
    (copy / MANIFEST).write_text(seal(manifest))
    with pytest.raises(CheckpointError, match=message):
        opened = Checkpoint.open(copy)
        assert opened.config
        load_weights(TinyModel(), opened)


def test_any_part_of_a_tensor_can_be_read(saved: Path) -> None:
    checkpoint, model = Checkpoint.open(saved), TinyModel(seed=1)
    load_weights(model, checkpoint)
    for name, parameter in model.named_parameters():
        flat = checkpoint.tensor("weight", name).view(-1)
        assert torch.equal(flat, parameter.detach().view(-1))
        for start, numel in ((0, 1), (flat.numel() // 3, flat.numel() // 2), (flat.numel() - 1, 1), (3, 0)):
            assert torch.equal(checkpoint.read("weight", name, start, numel), flat[start : start + numel])
    assert not torch.equal(checkpoint.tensor("exp_avg", "out.bias"), torch.zeros(256))
    with pytest.raises(CheckpointError, match=r"no momentum of out.bias"):
        checkpoint.tensor("momentum", "out.bias")


def test_the_newest_is_the_highest_step(tmp_path: Path) -> None:
    assert find_newest(tmp_path / "nowhere") is None
    for name in ("00000009", "00000010", "123456789", ".tmp-00000300-a", "set-aside-00000400", "00000500.txt", "notes"):
        (tmp_path / name).mkdir()
    assert find_newest(tmp_path) == tmp_path / "123456789"
    (tmp_path / "123456789").rmdir()
    assert find_newest(tmp_path) == tmp_path / "00000010"


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        Checkpoint.open(tmp_path / "00000001")
    (tmp_path / "00000001").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest.json: missing"):
        Checkpoint.open(tmp_path / "00000001")
