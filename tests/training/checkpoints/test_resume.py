"""Where a run starts: never silently at 0, never with another configuration or other data, never past a damaged one,
and never with a metrics.jsonl that contradicts it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megasparse.config.schema import Config
from megasparse.errors import CheckpointError
from megasparse.training.checkpoints import checkpoint, manifest, resume
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import find_newest, read_manifest
from megasparse.training.checkpoints.resume import find_start
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.loop import train
from megasparse.training.ranks import Ranks
from tests.helpers.tiny import identity_of, metrics, tiny_config, tiny_engine, tiny_run

BYTES = {"name": "bytes", "sha256": "b"}


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 1, 2 and 3."""
    config = tiny_config(tmp_path / "run", checkpoint={"keep": 3})
    engine = tiny_engine(config)
    for step in (1, 2, 3):
        Saver(identity_of(config, tokenizer=BYTES), Ranks()).save(engine, step, step * 8, {})
    return config


def start(config: Config, choice: str = "auto", data: str = "data", **more: Any) -> Checkpoint | None:
    identity = identity_of(config, data, more.pop("tokenizer", BYTES))
    return find_start(identity, Ranks(), resume=choice, **more)


def checkpoints(config: Config) -> Path:
    return Path(config.run.directory) / "checkpoints"


def test_auto_resumes_from_the_newest_and_a_new_run_starts_without_one(run, tmp_path):
    result = start(run)
    assert (result.step, result.sequences) == (3, 24)
    assert start(tiny_config(tmp_path / "new")) is None
    assert start(tiny_config(tmp_path / "new"), "never") is None


def test_never_does_not_overwrite_a_run(run):
    with pytest.raises(CheckpointError, match=r"Choose another run.directory"):
        start(run, "never")


TEXTS = (b"", b"00000001\n", b"00000099\n", b"../../etc\n", b"\0", b"7" * 10_000, b"\0" * 10_000)


@pytest.mark.parametrize("hint", ["missing", "link", "folder", *TEXTS])
def test_the_hint_is_never_trusted(run, hint):
    (checkpoints(run) / "١٢٣٤٥٦٧٨").mkdir()  # digits, but no step's name
    latest = checkpoints(run) / "latest"
    latest.unlink()
    if hint == "link":
        latest.symlink_to(latest.with_name("00000001"))
    elif hint == "folder":
        latest.mkdir()
    elif hint != "missing":
        latest.write_bytes(hint)
    assert start(run).step == 3


@pytest.mark.parametrize("link", ["00000003", "nowhere", "file", "folder"])
def test_a_numbered_entry_without_a_checkpoint_is_rejected_by_name(run, link):
    entry = checkpoints(run) / "00000004"
    {"file": entry.touch, "folder": entry.mkdir}.get(link, lambda: entry.symlink_to(entry.with_name(link)))()
    with pytest.raises(CheckpointError, match=r"00000004.*damaged.*--resume \S*00000003") as caught:
        start(run)
    assert start(run, str(caught.value).rpartition("--resume ")[2]).step == 3
    assert not (checkpoints(run) / "00000004").exists(), "what is later was set aside"


def truncate(path: Path) -> None:
    (path / "rank-00000.safetensors").write_bytes(b"1234")


def forget(path: Path) -> None:
    (path / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [truncate, forget])
def test_a_damaged_newest_is_rejected_and_an_older_one_named(run, damage):
    damage(checkpoints(run) / "00000003")
    damage(checkpoints(run) / "00000002")
    with pytest.raises(CheckpointError, match=r"00000003.*damaged.*--resume \S*00000001") as caught:
        start(run)
    older = str(caught.value).rpartition("--resume ")[2]
    assert start(run, older).step == 1
    left = sorted(path.name for path in checkpoints(run).iterdir())
    assert left == ["00000001", "latest", "set-aside-00000002", "set-aside-00000003"]
    assert find_newest(checkpoints(run)) == checkpoints(run) / "00000001"


@pytest.mark.parametrize("damage", [truncate, forget])
def test_when_all_are_damaged_the_run_does_not_start_at_zero(run, damage):
    for path in checkpoints(run).glob("0*"):
        damage(path)
    with pytest.raises(CheckpointError, match="No older checkpoint is complete"):
        start(run)


def test_another_runs_checkpoint_starts_a_new_directory_only(run, tmp_path):
    newest = str(checkpoints(run) / "00000003")
    assert start(tiny_config(tmp_path / "new"), newest).step == 3
    own = tiny_config(tmp_path / "own")
    engine = tiny_engine(own)
    Saver(identity_of(own, tokenizer=BYTES), Ranks()).save(engine, 7, 56, {})
    with pytest.raises(CheckpointError, match=r"its own checkpoints.*Choose another run.directory"):
        start(own, newest)


def test_an_edited_configuration_is_rejected_key_by_key(run, capsys):
    changed = {"attention": {"pattern": ["full"]}, "layers": 3, "vocabulary": 300}
    edited = tiny_config(run.run.directory, optimizer={"learning_rate": 0.02}, model=changed)
    with pytest.raises(CheckpointError) as caught:
        start(edited)
    message = str(caught.value)
    assert 'model.attention.pattern: ["local", "local", "lsh", "local"] -> ["full"]' in message
    assert "optimizer.learning_rate: 0.01 -> 0.02" in message
    assert "model.layers: 12 -> 3" in message and "model.vocabulary: 256 -> 300" in message
    assert "Restore them, choose another run.directory" in message and "--allow-changed-config" in message
    assert "checkpoint.keep" not in message
    assert start(edited, allow_changed_config=True).step == 3
    logged = capsys.readouterr().err
    assert "as requested" in logged and "optimizer.learning_rate: 0.01 -> 0.02" in logged and "model.layers" in logged


def test_other_versions_are_reported(run, capsys, monkeypatch):
    start(run)
    assert "other versions" not in capsys.readouterr().err
    monkeypatch.setattr(resume, "versions", lambda: {**manifest.versions(), "torch": "2.7.0"})
    start(run)
    then = manifest.versions()["torch"]
    assert f'resuming under other versions (torch: "{then}" -> "2.7.0")' in capsys.readouterr().err


def test_keys_that_do_not_change_the_run_may_be_edited(run, capsys):
    sections: Any = {"training": {"steps": 40, "micro_batch": 4}, "data": {"path": "elsewhere"}}
    sections |= {"run": {"hang_timeout": 5.0, "deterministic": True}, "deepspeed": {"zero_optimization": {"stage": 2}}}
    sections |= {"checkpoint": {"keep": 9}, "evaluation": {"every": 3}, "logging": {"every": 3}}
    assert start(tiny_config(run.run.directory, "deepspeed", **sections)) is not None
    assert "training.steps: 20 -> 40" in capsys.readouterr().err
    for kind in ("ranked", "lha", "smart_bird"):  # their auxiliary losses are means over a micro-batch
        with pytest.raises(CheckpointError, match=r"training\.micro_batch: 2 -> 4"):
            start(tiny_config(run.run.directory, model={"attention": {"pattern": ["local", {kind: 2}]}}, **sections))


@pytest.mark.parametrize("allowed", [False, True])
def test_other_data_or_tokenizers_are_always_rejected(run, allowed):
    with pytest.raises(CheckpointError, match=r'other data: data: "data" -> "other"\. Point data.path'):
        start(run, data="other", allow_changed_config=allowed)
    with pytest.raises(CheckpointError, match=r'other data: tokenizer.sha256: "b" -> "c"\. Point'):
        start(run, tokenizer={"name": "bytes", "sha256": "c"}, allow_changed_config=allowed)


def test_another_mixture_is_told_and_moved_folders_are_the_same(run):
    mixed = tiny_config(run.run.directory, data={"mixture": {"a": 2.0, "b": 1.0}})
    reported = r'other data: data: "data" -> "other"; data\.mixture: \{\} -> '
    with pytest.raises(CheckpointError, match=reported + r"\{.a.: 2\.0, .b.: 1\.0\}\. Point data\.path or data\.mix"):
        start(mixed, data="other", allow_changed_config=True)
    assert start(mixed) is not None


def config_of(folder: Path, steps: int = 6, **checkpoint: Any) -> Config:
    return tiny_config(folder, training={"steps": steps}, checkpoint={"every": 2, "keep": 5, **checkpoint})


def losses_of(config: Config, stop_at: int | None = None, **options: Any) -> list[str]:
    """Train; the losses of all steps to the last bit."""
    with tiny_run(config, stop_at=stop_at, **options) as opened:
        train(opened)
    rows = metrics(config)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [float(row["train/loss"]).hex() for row in rows]


@pytest.fixture
def straight(tmp_path):
    return losses_of(config_of(tmp_path / "straight"))


def test_a_shorter_run_branches_from_the_stable_part_of_wsd(tmp_path, capsys):
    def run(name: str, steps: int, resume: str = "auto") -> list[str]:
        values = {"schedule": "wsd", "decay_fraction": 0.5}
        config = tiny_config(
            tmp_path / name, training={"steps": steps}, optimizer=values, checkpoint={"every": 2, "keep": 5}
        )
        with tiny_run(config, resume=resume) as opened:
            train(opened)
        return [float(row["train/loss"]).hex() for row in metrics(config)]

    run("long", 8)
    short = run("short", 4)
    message = "the learning rate differs from this step on"
    capsys.readouterr()
    assert run("branch", 4, str(tmp_path / "long/checkpoints/00000002")) == short[2:]
    assert message not in capsys.readouterr().err
    run("late", 6, str(tmp_path / "long/checkpoints/00000004"))
    assert message in capsys.readouterr().err


def lines(folder: Path) -> list[bytes]:
    return (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)


def remove(folder: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(folder / "checkpoints" / f"{step:08d}")


@pytest.mark.parametrize(
    ("changed", "stop", "refused"),
    [({}, 4, False), ({}, 5, True), ({"every": 0}, 5, False), ({"on_failure": "continue"}, 5, False)],
)
def test_a_run_without_its_checkpoints_never_restarts_silently(tmp_path, straight, changed, stop, refused):
    """If one must have existed, also if it was saved asynchronously."""
    folder = tmp_path / "run"
    config = config_of(folder, **changed)
    losses_of(config, stop_at=stop)
    before = lines(folder)
    shutil.rmtree(folder / "checkpoints")
    if not refused:
        assert losses_of(config) == straight
        return
    with pytest.raises(CheckpointError, match=rf"ends at step {stop}, but all checkpoints are missing"):
        losses_of(config)
    assert lines(folder) == before, "nothing was cut"
    assert losses_of(config, resume="never") == straight


def test_a_checkpoint_and_metrics_of_different_runs_are_rejected(tmp_path):
    """The same configuration and data, but a checkpoint that another run has saved: here, with other losses."""
    config = config_of(tmp_path / "run")
    losses_of(config, stop_at=4)
    own = lines(tmp_path / "run")
    row = json.loads(own[3])
    other = json.dumps(row | {"train/loss": row["train/loss"] + 1e-9}).encode() + b"\n"
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"".join([*own[:3], other]))
    with pytest.raises(CheckpointError, match=r"the loss of step 4 is .* they belong to different runs. Move"):
        losses_of(config)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with tiny_run(config) as opened:
        train(opened)
    assert [row["step"] for row in metrics(config)] == [5, 6]


def test_a_checkpoint_that_its_run_deletes_while_it_is_opened_is_passed_over(run, monkeypatch):
    def delete(path: Path) -> Any:
        if path.name == "00000003":
            remove(Path(run.run.directory), 3)
        return read_manifest(path)

    monkeypatch.setattr(checkpoint, "read_manifest", delete)
    assert checkpoint.open_newest(Path(run.run.directory)).step == 2
    (checkpoints(run) / "00000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"00000002/manifest.json: missing"):
        checkpoint.open_newest(Path(run.run.directory))
