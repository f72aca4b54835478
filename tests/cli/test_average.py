"""The command itself: means of weights, runs that are restored from them, and what it refuses."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from megasparse.cli.main import door
from megasparse.evaluation.restore import restore
from megasparse.tasks.restore import restore_task
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import MANIFEST, seal
from tests.helpers.commands import refused
from tests.helpers.finetuning import ENCODER, launch, reviews
from tests.helpers.trained import prepared, trained

main = door("average")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A pretraining run of 4 steps and a fine-tuning run of 6, each with a checkpoint a step."""
    folder = tmp_path_factory.mktemp("averaged")
    every = {"every": 1, "keep": 9}
    trained(prepared(folder), folder / "pretrained", ["routing"], 4, checkpoint=every)
    table = reviews(folder / "reviews.csv", 24)
    launch(folder / "finetuned", table, model=ENCODER, checkpoint={"every": 1, "keep": 4})
    yield folder


def checkpoints(run: Path) -> list[Checkpoint]:
    return [Checkpoint.open(path) for path in sorted((run / "checkpoints").glob("0*"))]


@pytest.mark.parametrize("kind, last", [("pretrained", 4), ("pretrained", 1), ("finetuned", 3)])
def test_weights_are_the_mean_of_the_last_ones(runs, tmp_path, kind, last):
    main([str(runs / kind), "--last", str(last), "--output", str(tmp_path / "mean")])
    (written,), given = checkpoints(tmp_path / "mean"), checkpoints(runs / kind)[-last:]
    assert written.step == given[-1].step and written.optimizer_steps == 0
    assert written.state == {"averaged": {"run": str(runs / kind), "steps": [each.step for each in given]}}
    names = list(given[-1].manifest["tensors"]["weight"])
    assert list(written.manifest["tensors"]) == ["weight"] and list(written.manifest["tensors"]["weight"]) == names
    moved = 0
    for name in names:
        values = [each.tensor("weight", name) for each in given]
        wanted = [math.fsum(row) / last for row in zip(*(x.flatten().tolist() for x in values), strict=True)]
        found = written.tensor("weight", name)
        assert torch.equal(found, torch.tensor(wanted).view(found.shape))
        moved += not torch.equal(found, values[-1])
    assert moved > 5 or last == 1


def test_a_pretrained_mean_is_restored(runs, tmp_path):
    main([str(runs / "pretrained"), "--last", "2", "--output", str(tmp_path / "mean")])
    model, config, checkpoint, _ = restore(str(tmp_path / "mean"), [])
    assert config.run.directory == str(tmp_path / "mean")
    for name, weight in model.named_parameters():
        assert torch.equal(weight.detach(), checkpoint.tensor("weight", name))
    assert json.loads((tmp_path / "mean" / "config.json").read_text())["model"]["max_length"] == 64


def test_a_finetuned_mean_is_restored_without_its_run(runs, tmp_path, monkeypatch):
    copy = shutil.copytree(runs / "finetuned", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    main(["run", "--last", "4", "--output", "mean"])
    shutil.rmtree(copy)
    found = restore_task("mean")
    assert found.checkpoint.path == Path("mean", "checkpoints", "00000006")
    for name, weight in found.model.named_parameters():
        assert torch.equal(weight.detach(), found.checkpoint.tensor("weight", name))


def test_what_cannot_be_averaged_is_refused(runs, tmp_path, capsys):
    output = ("--output", str(tmp_path / "mean"))
    run = str(runs / "finetuned")
    reported = refused(capsys, main, run, "--last", "99", *output)
    assert "checkpoints, and 99 are to be averaged. Give --last " in reported and "checkpoint.keep = 4" in reported
    with pytest.raises(SystemExit, match="2"):
        main([run, "--last", "0", *output])
    assert "is not a whole number of 1 or more" in capsys.readouterr().err
    assert "holds no checkpoint" in refused(capsys, main, str(tmp_path), *output)
    assert "exists already" in refused(capsys, main, run, "--output", str(runs))

    mixed = shutil.copytree(runs / "pretrained", tmp_path / "mixed")
    manifest = mixed / "checkpoints" / "00000003" / MANIFEST
    values = json.loads(manifest.read_text())
    model = {**values["config"]["model"], "dropout": 0.2}
    for part, change in (
        ("tokenizer", {"tokenizer": {"name": "bytes", "sha256": "0"}}),
        ("model", {"config": {**values["config"], "model": model}}),
    ):
        manifest.write_text(seal({**values, **change}))
        reported = refused(capsys, main, str(mixed), "--last", "2", *output)
        assert f"differs from {mixed}/checkpoints/00000004 in {part}: it belongs to" in reported
    shutil.rmtree(mixed / "checkpoints" / "00000003")
    other = shutil.copytree(runs / "finetuned" / "checkpoints" / "00000006", mixed / "checkpoints" / "00000006")
    reported = refused(capsys, main, str(mixed), "--last", "2", *output)
    assert f"{mixed}/checkpoints/00000004: differs from {other} in the weight " in reported

    damaged = next((runs / "finetuned" / "checkpoints").glob("00000005")) / "rank-00000.safetensors"
    broken = shutil.copytree(runs / "finetuned", tmp_path / "broken") / damaged.relative_to(runs / "finetuned")
    broken.write_bytes(broken.read_bytes()[:-4] + b"\0\0\0\1")
    assert "changed since it was written" in refused(capsys, main, str(tmp_path / "broken"), "--last", "2", *output)
    assert not (tmp_path / "mean").exists()
