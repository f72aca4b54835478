"""Saving: a crash at any moment leaves the newest complete checkpoint whole."""

import dataclasses
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megasparse.errors import CheckpointError
from megasparse.training import saving
from megasparse.training.checkpoint import Checkpoint
from megasparse.training.engine import Engine, build_engine
from megasparse.training.ranks import Ranks
from megasparse.training.resume import find_start
from megasparse.training.run_folder import find_newest, list_checkpoints
from megasparse.training.saving import Saver
from tests.helpers.tiny import TinyModel, make_draws, tiny_config


class Killed(BaseException):
    """As SIGKILL: nothing of ours may catch it and clean up."""


def prepare(folder: Path) -> tuple[Saver, Engine]:
    config = tiny_config(folder, checkpoint={"keep": 2})
    return Saver(config, Ranks(), "data", {}), build_engine(TinyModel(), config, make_draws, Ranks())


def die_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> Callable[[], int]:
    """Die just before the file system's `moment`-th change, counted from 0; returns the number of changes so far."""
    count = 0

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **keywords: Any) -> Any:
            nonlocal count
            if count == moment:
                raise Killed
            count += 1
            return change(*args, **keywords)

        return instead

    for owner, name in (
        (os, "fsync"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"),
        (Path, "open"), (Path, "rename"), (Path, "mkdir"), (saving.shutil, "rmtree"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))
    return lambda: count


def test_a_crash_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    moment, finished, outcomes = 0, False, []
    while not finished:
        saver, engine = prepare(tmp_path / str(moment))
        for step in (1, 2):
            saver.save(engine, step, step * 8)
        with pytest.MonkeyPatch.context() as patch:
            die_at(patch, moment)
            try:
                saver.save(engine, 3, 24)
                finished = True
            except Killed:
                pass
        complete = [Checkpoint.open(path).step for path in list_checkpoints(saver.directory)]
        assert complete in ([1, 2], [1, 2, 3], [2, 3])
        outcomes.append(complete)
        start = find_start("auto", saver)
        assert start is not None and start.step == complete[-1]
        assert not list(saver.directory.glob(".tmp-*")), "the next start cleans up"
        moment += 1
    assert moment > 10 and outcomes[0] == [1, 2] and outcomes[-1] == [2, 3] and [1, 2, 3] in outcomes


def test_the_newest_are_kept(tmp_path: Path) -> None:
    saver, engine = prepare(tmp_path)
    for step in range(1, 6):
        assert saver.save(engine, step, step * 8).name == f"{step:08d}"
    assert [path.name for path in list_checkpoints(saver.directory)] == ["00000004", "00000005"]
    assert (saver.directory / "latest").read_text() == "00000005\n"
    assert sorted(path.name for path in saver.directory.iterdir()) == ["00000004", "00000005", "latest"]


def test_what_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    saver, engine = prepare(tmp_path)
    saver.save(engine, 1, 8)
    with torch.no_grad():
        engine.module.get_parameter("hidden.bias")[2] = float("nan")
    with pytest.raises(CheckpointError, match=r"weight of hidden.bias holds a number that is not finite"):
        saver.save(engine, 2, 16)
    assert sorted(path.name for path in saver.directory.iterdir()) == ["00000001", "latest"]
    assert Checkpoint.open(find_newest(saver.directory) or "").step == 1


def test_pieces_that_do_not_add_up_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, engine = prepare(tmp_path)
    fragments = engine.fragments()
    for wrong in (fragments[1:] + fragments[2:3], [dataclasses.replace(fragments[0], start=1), *fragments[1:]]):
        monkeypatch.setattr(engine, "fragments", lambda wrong=wrong: wrong)
        with pytest.raises(CheckpointError, match=r"was not saved.*weight of"):
            saver.save(engine, 1, 8)
    assert find_newest(saver.directory) is None


@pytest.mark.parametrize("call", range(5))
def test_a_disk_that_refuses_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """The `call`-th fsync of a save fails: of a file, of the manifest, of a directory."""
    saver, engine = prepare(tmp_path)
    saver.save(engine, 1, 8)
    calls, fsync = 0, os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    if call == 4:  # of `latest`, when the new checkpoint is complete: only told
        saver.save(engine, 2, 16)
        return
    with pytest.raises(CheckpointError, match=r"No space left on device \([\d,]+ bytes free\)"):
        saver.save(engine, 2, 16)
    assert not list(saver.directory.glob(".tmp-*"))
    assert all(Checkpoint.open(path) for path in list_checkpoints(saver.directory))


def test_files_are_ordinary_safetensors_and_not_writable_by_all(tmp_path: Path) -> None:
    saver, engine = prepare(tmp_path)
    path = saver.save(engine, 1, 8)
    stored = load_file(path / "rank-00000.safetensors")
    weights = Checkpoint.open(path).manifest["tensors"]["weight"]
    for name, parameter in engine.module.named_parameters():
        (piece,) = weights[name]["pieces"]
        assert torch.equal(stored[piece["key"]], parameter.detach().view(-1))
        assert weights[name]["shape"] == list(parameter.shape)
    for entry in (path, *path.iterdir()):
        assert not entry.stat().st_mode & stat.S_IWOTH
