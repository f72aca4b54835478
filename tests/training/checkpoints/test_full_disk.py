"""Storage that refuses: the message says what to do, nothing is left of the attempt, and older checkpoints open."""

import errno
import io
import os
import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from megasparse.errors import StorageError
from megasparse.training.checkpoints import rank_file
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import list_checkpoints
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, RunHooks
from tests.helpers.ranks_in_threads import run_in_threads
from tests.helpers.tiny import identity_of, tiny_config, tiny_engine
from tests.training.checkpoints.test_saving import fail_in_rank_1, names, prepare, save

ROOM = r"\([\d,]+ bytes needed, [\d,]+ bytes free\)"


def refused(saver: Saver, engine: Engine, match: str) -> None:
    """Saving step 2 raises StorageError as `match`, and checkpoint 1 is the only one, untouched."""
    with pytest.raises(StorageError, match=match) as caught:
        save(saver, engine, 2)
    assert caught.value.exit_code == 3 and "Older checkpoints are untouched" in str(caught.value)
    assert names(saver.directory) == ["00000001", "latest"]
    assert Checkpoint.open(saver.directory / "00000001").step == 1


def test_too_little_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    saver, engine = prepare(tmp_path, 1)
    needed = (saver.directory / "00000001" / "rank-00000.safetensors").stat().st_size
    monkeypatch.setattr(os, "mkdir", lambda *_: pytest.fail("something was written"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    match = f"checkpoints: no room for the checkpoint of step 2: {needed:,} bytes needed, {needed - 1:,} bytes free"
    refused(saver, engine, match)
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    assert saver.save(engine, 2, 16, {}) is not None


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO"])
@pytest.mark.parametrize("call", ["mkdir", "open", "fsync"])
def test_whatever_fails_is_named_and_a_later_save_works(tmp_path, monkeypatch, call, code, asynchronous):
    saver, engine = prepare(tmp_path, 1, asynchronous=asynchronous)
    number, real = getattr(errno, code), getattr(os, call)

    def fail(path: Any, *arguments: Any, **keywords: Any) -> Any:
        if call == "open" and not arguments[0] & os.O_CREAT:
            return real(path, *arguments, **keywords)
        raise OSError(number, os.strerror(number), None if call == "fsync" else path)

    monkeypatch.setattr(os, call, fail)
    refused(saver, engine, rf"00000002-\w+\S*: {os.strerror(number)} {ROOM}")
    monkeypatch.undo()
    save(saver, engine, 2)
    assert [Checkpoint.open(path).step for path in list_checkpoints(saver.directory)] == [1, 2]


@pytest.mark.parametrize("call", range(5))
def test_a_disk_that_refuses_at_any_fsync_leaves_no_trace(tmp_path, monkeypatch, call):
    """Syncs of a rank's file, the manifest, the new directory, the directory above, and `latest`."""
    saver, engine = prepare(tmp_path, 1)
    calls, fsync = 0, os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    if call == 4:  # the new checkpoint is complete: only a warning
        assert saver.save(engine, 2, 16, {}) is not None
        assert names(saver.directory) == ["00000001", "00000002", "latest"]
        return
    refused(saver, engine, rf"No space left on device {ROOM}")
    assert saver.save(engine, 2, 16, {}) is not None


def test_a_write_that_is_cut_short_in_silence_is_noticed(tmp_path, monkeypatch):
    saver, engine = prepare(tmp_path, 1)

    class Short(io.FileIO):
        def write(self, numbers: Any) -> int:
            return super().write(bytes(numbers)[:100])

    monkeypatch.setattr(rank_file.os, "fdopen", lambda descriptor, mode: Short(descriptor, mode))
    refused(saver, engine, rf"[\d,]+ of [\d,]+ bytes were kept {ROOM}")
    monkeypatch.undo()
    assert saver.save(engine, 2, 16, {}) is not None


def test_a_folder_that_vanishes_is_named(tmp_path):
    saver, engine = prepare(tmp_path, 1)

    def vanish(doing: str) -> None:
        for path in saver.directory.glob(".tmp-*"):
            shutil.rmtree(path)

    saver.hooks = RunHooks(alive=vanish)
    refused(saver, engine, rf"manifest.json: No such file or directory {ROOM}")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_goes_on_to_the_next_interval_if_configured_so(tmp_path, monkeypatch, capsys, asynchronous):
    """On two ranks, of which the second cannot write: both go on without, and both have the next checkpoint."""
    checkpoint = {"on_failure": "continue", "asynchronous": asynchronous}
    config = tiny_config(tmp_path, checkpoint=checkpoint)
    fail_in_rank_1(monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def work(ranks: Ranks) -> list[bool]:
        paths = save(Saver(identity_of(config), ranks), tiny_engine(config, ranks), 1, 2, 3)
        return [path is not None for path in paths]

    assert run_in_threads(work) == [[True, False, True]] * 2
    assert names(tmp_path / "checkpoints") == ["00000001", "00000003", "latest"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "checkpoint.on_failure" in line and "Rank 1" in line and "No space left on device" in line
