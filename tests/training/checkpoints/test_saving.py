"""Saving: a crash at any moment leaves the newest complete checkpoint whole, training goes on meanwhile, and storage
that refuses is named."""

import dataclasses
import errno
import io
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from megasparse.errors import CheckpointError, StorageError, TrainingError
from megasparse.files import LOCK_FILE, JsonLines
from megasparse.training.checkpoints import rank_file, saving
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import MANIFEST, find_newest, list_checkpoints, seal
from megasparse.training.checkpoints.rank_file import RankFile
from megasparse.training.checkpoints.resume import find_start
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, RunHooks
from tests.helpers.cases import together
from tests.helpers.ranks_in_threads import run_in_threads
from tests.helpers.tiny import identity_of, tiny_config, tiny_engine, train_steps


class Killed(BaseException):
    """Acts like SIGKILL: megasparse must not catch it and clean up."""


class AtOnce(threading.Thread):
    """A thread that finishes its work before `start` returns and dies with its process."""

    def start(self) -> None:
        self.run()

    def is_alive(self) -> bool:
        return False


def prepare(folder: Path, *saved: int, **checkpoint: Any) -> tuple[Saver, Engine]:
    """The saver and the engine of a run that has saved these steps."""
    config = tiny_config(folder, checkpoint={"keep": 2, **checkpoint})
    saver, engine = Saver(identity_of(config), Ranks()), tiny_engine(config)
    save(saver, engine, *saved)
    return saver, engine


def save(saver: Saver, engine: Engine, *steps: int) -> list[Path | None]:
    """Save these steps, each to its end. Returns their paths, None for those that are not saved."""
    return [saver.save(engine, step, step * 8, {}) or saver.finish() for step in steps]


def before_writing(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], Any]) -> None:
    """Call `act` with the path of each rank's file before it is written; False, as of a wait in vain, fails."""
    write = rank_file.RankFile.write

    def instead(file: rank_file.RankFile, path: Path, progress: Callable[[], None]) -> str:
        assert act(path) is not False
        return write(file, path, progress)

    monkeypatch.setattr(rank_file.RankFile, "write", instead)


def fail_in_rank_1(monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    """Let rank 1 not write its part of step 2."""

    def fail(path: Path) -> None:
        if path.name == "rank-00001.safetensors" and "00000002" in path.parent.name:
            raise raised

    before_writing(monkeypatch, fail)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def die_at(monkeypatch: pytest.MonkeyPatch, saver: Saver, moment: int) -> Callable[[], int]:
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

    for name in ("open", "fdopen", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    monkeypatch.setattr(saving.shutil, "rmtree", dying(saving.shutil.rmtree))
    monkeypatch.setattr(saver, "hooks", RunHooks(alive=dying(saver.hooks.alive)))  # between two blocks of a file
    return lambda: count


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_crash_at_any_moment_leaves_a_complete_checkpoint(tmp_path, asynchronous):
    moment, finished, outcomes = 0, False, []
    while not finished:
        saver, engine = prepare(tmp_path / str(moment), 1, 2, asynchronous=asynchronous)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "Thread", AtOnce)
            die_at(patch, saver, moment)
            try:
                save(saver, engine, 3)
                finished = True
            except Killed:
                pass
        complete = [Checkpoint.open(path).step for path in list_checkpoints(saver.directory)]
        assert complete in ([1, 2], [1, 2, 3], [2, 3])
        outcomes.append(complete)
        start = find_start(saver.run, Ranks())
        assert start.step == complete[-1]
        assert not list(saver.directory.glob(".tmp-*")), "the next start cleans up"
        moment += 1
    assert moment > 15 and outcomes[0] == [1, 2] and outcomes[-1] == [2, 3] and [1, 2, 3] in outcomes


def test_the_newest_are_kept(tmp_path):
    saver, engine = prepare(tmp_path)
    assert save(saver, engine, *range(1, 6)) == [saver.directory / f"{step:08d}" for step in range(1, 6)]
    assert names(saver.directory) == ["00000004", "00000005", "latest"]
    assert (saver.directory / "latest").read_text() == "00000005\n"


def test_leftovers_are_deleted_by_the_next_save(tmp_path):
    saver, engine = prepare(tmp_path)
    (saver.directory / ".tmp-00000001-a").mkdir(parents=True)
    (saver.directory / ".tmp-latest-b").write_text("")
    (saver.directory / ".tmp-link").symlink_to(tmp_path)
    saver.save(engine, 2, 16, {})
    assert names(saver.directory) == ["00000002", "latest"] and tmp_path.exists()


def test_a_checkpoint_is_never_written_over(tmp_path):
    saver, engine = prepare(tmp_path)
    path = saver.save(engine, 1, 8, {})
    before = (path / MANIFEST).read_bytes()
    with pytest.raises(CheckpointError, match="00000001: exists already"):
        saver.save(engine, 1, 8, {})
    assert (path / MANIFEST).read_bytes() == before and names(saver.directory) == ["00000001", "latest"]


def test_the_state_of_the_loop_is_restored_exactly(tmp_path):
    saver, engine = prepare(tmp_path)
    state = {"losses": [0.1, 1 / 3, 5e-324, 1.7976931348623157e308], "skipped": 3, "deep": {"names": ["ä", None]}}
    path = saver.save(engine, 1, 8, state)
    assert Checkpoint.open(path).state == state
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["state"]  # as an older version wrote it
    (path / MANIFEST).write_text(seal(manifest))
    assert Checkpoint.open(path).state == {}


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_non_finite_state_is_not_saved(tmp_path, number, asynchronous):
    saver, engine = prepare(tmp_path, 1, asynchronous=asynchronous)
    with torch.no_grad():
        engine.module.get_parameter("hidden.bias")[2] = number
    with pytest.raises(TrainingError, match=r"weight of hidden.bias contains a number that is not finite") as caught:
        save(saver, engine, 2)
    assert caught.value.exit_code == 4
    assert names(saver.directory) == ["00000001", "latest"]
    assert Checkpoint.open(find_newest(saver.directory) or "").step == 1


def test_pieces_that_do_not_add_up_are_not_saved(tmp_path, monkeypatch):
    saver, engine = prepare(tmp_path)
    fragments = engine.fragments()
    for wrong in (fragments[1:] + fragments[2:3], [dataclasses.replace(fragments[0], start=1), *fragments[1:]]):
        monkeypatch.setattr(engine, "fragments", lambda wrong=wrong: wrong)
        with pytest.raises(CheckpointError, match=r"was not saved.*weight of"):
            saver.save(engine, 1, 8, {})
    assert names(saver.directory) == []


def test_files_are_ordinary_safetensors(tmp_path):
    saver, engine = prepare(tmp_path)
    path = saver.save(engine, 1, 8, {})
    stored = load_file(path / "rank-00000.safetensors")
    weights = Checkpoint.open(path).manifest["tensors"]["weight"]
    for name, parameter in engine.module.named_parameters():
        (piece,) = weights[name]["pieces"]
        assert torch.equal(stored[piece["key"]], parameter.detach().view(-1))
        assert weights[name]["shape"] == list(parameter.shape)


def test_large_tensors_are_written_and_reported_in_blocks(tmp_path, monkeypatch):
    saver, engine = prepare(tmp_path)
    whole = saver.save(engine, 1, 8, {})
    monkeypatch.setattr(rank_file, "BLOCK", 100)
    monkeypatch.setattr(rank_file, "SYNC_EVERY", 4096)
    reported: list[str] = []
    saver.hooks = RunHooks(alive=reported.append)
    cut = saver.save(engine, 2, 16, {})
    assert (cut / "rank-00000.safetensors").read_bytes() == (whole / "rank-00000.safetensors").read_bytes()
    assert reported == ["saving step 2"] * sum(-(-f.numel // 100) for f in engine.fragments())
    reported.clear()
    Checkpoint.open(cut, progress=reported.append)
    assert reported == [f"verifying {cut}"]


@pytest.mark.parametrize("umask", [0, 0o027, 0o077])
def test_files_are_never_writable_by_others(tmp_path, umask):
    saver, engine = prepare(tmp_path / "run")
    before = os.umask(umask)
    try:
        path = saver.save(engine, 1, 8, {})
    finally:
        os.umask(before)
    for entry in (tmp_path / "run", saver.directory, *saver.directory.iterdir(), *path.iterdir()):
        mode = stat.S_IMODE(entry.stat().st_mode)
        assert mode == (0o755 if entry.is_dir() else 0o644) & ~umask, entry


def test_a_planted_link_is_not_written_through(tmp_path, monkeypatch):
    saver, engine = prepare(tmp_path / "run")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    saver.directory.mkdir(parents=True)
    (saver.directory / "latest").symlink_to(victim)
    assert saver.save(engine, 1, 8, {}) is not None
    assert victim.read_text() == "precious" and not (saver.directory / "latest").is_symlink()
    monkeypatch.setattr(saving.uuid, "uuid4", lambda: type("Guessed", (), {"hex": "0"}))
    guessed = saver.directory / ".tmp-00000002-0"
    guessed.mkdir()
    (guessed / "rank-00000.safetensors").symlink_to(victim)
    with pytest.raises(CheckpointError, match="was not saved"):
        saver.save(engine, 2, 16, {})
    assert victim.read_text() == "precious"


FILE = "rank-00000.safetensors"


@pytest.fixture
def gate(monkeypatch):
    """No rank's file is written before this event."""
    event = threading.Event()
    before_writing(monkeypatch, lambda path: event.wait(600))
    yield event
    event.set()


def test_training_continues_and_the_checkpoint_equals_a_synchronous_save(tmp_path, gate):
    files = {}
    for asynchronous in (True, False):
        saver, engine = prepare(tmp_path / "run", asynchronous=asynchronous)
        train_steps(engine, saver.config, 1, 2)
        state = {"losses": [0.1]}
        if not asynchronous:
            gate.set()
        path = saver.save(engine, 2, 16, state)
        if asynchronous:
            assert path is None and saver.pending() and list_checkpoints(saver.directory) == []
            state["losses"].append(0.2)
            train_steps(engine, saver.config, 3, 4)
            assert saver.pending()
            gate.set()
            path = saver.finish()
        assert path is not None and not saver.pending() and saver.finish() is None
        opened = Checkpoint.open(path)
        for what in ("config", "sha256"):  # `asynchronous` itself
            opened.manifest.pop(what)
        files[asynchronous] = (opened.manifest, (path / FILE).read_bytes())
        (tmp_path / "run").rename(tmp_path / f"asynchronous-{asynchronous}")
    assert files[True] == files[False]
    assert files[True][0]["state"] == {"losses": [0.1]} and files[True][0]["optimizer_steps"] == 2


class OnGpu(torch.Tensor):
    """Acts like a tensor on a GPU whose asynchronous copies wait for the stream."""

    is_cuda = property(lambda self: True)
    queue: ClassVar[list[Callable[[], Any]]] = []

    @classmethod
    def __torch_function__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call is torch.Tensor.copy_ and kwargs == {"non_blocking": True}:
            target, source = args
            cls.queue.append(lambda: target.copy_(source.as_subclass(torch.Tensor)))
            return target
        return super().__torch_function__(call, types, args, kwargs or {})

    @classmethod
    def synchronize(cls) -> None:
        while cls.queue:
            cls.queue.pop(0)()


def test_copies_from_a_gpu_are_queued_in_page_locked_blocks_and_awaited_once(tmp_path, monkeypatch):
    saver, engine = prepare(tmp_path, asynchronous=True)
    train_steps(engine, saver.config, 1, 1)
    fragments = engine.fragments()
    monkeypatch.setattr(rank_file, "BLOCK", 100)
    expected = RankFile(fragments)
    expected.write(tmp_path / "expected", lambda: None)
    pinned, waits, empty = [], [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, **k: pinned.append(pin_memory) or empty(*a, **k))
    stream = SimpleNamespace(synchronize=lambda: waits.append(len(OnGpu.queue)) or OnGpu.synchronize())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    on_gpu = RankFile([dataclasses.replace(f, memory=f.memory.as_subclass(OnGpu)) for f in fragments])
    blocks: list[torch.Tensor] = []
    for number in range(2):  # the second copy uses the blocks of the first
        copied = on_gpu.copy(blocks)
        for f in fragments:
            f.memory.add_(1)
        copied.write(tmp_path / str(number), lambda: None)
        assert copied.pieces == expected.pieces
    assert pinned == [True] * -(-sum(f.numel for f in fragments) // 100) and len(pinned) == len(blocks) > 10
    assert len(waits) == 2 and min(waits) >= len(fragments)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "expected").read_bytes() != (tmp_path / "1").read_bytes()


def test_one_save_at_a_time(tmp_path, gate):
    saver, engine = prepare(tmp_path, asynchronous=True)
    saver.save(engine, 1, 8, {})
    threading.Timer(0.2, gate.set).start()
    began = time.monotonic()
    train_steps(engine, saver.config, 1, 1)
    saver.save(engine, 2, 16, {})  # ends the first one before it touches the copy
    assert time.monotonic() - began >= 0.15
    assert Checkpoint.open(saver.directory / "00000001").optimizer_steps == 0
    assert saver.finish() == saver.directory / "00000002"
    first, second = (Checkpoint.open(path) for path in list_checkpoints(saver.directory))
    assert not torch.equal(first.tensor("weight", "out.bias"), second.tensor("weight", "out.bias"))


def test_a_pending_save_reports_progress_only_while_it_progresses(tmp_path, gate):
    saver, engine = prepare(tmp_path, asynchronous=True)
    reported: list[str] = []
    saver.hooks = RunHooks(alive=reported.append)
    saver.save(engine, 1, 8, {})
    assert reported == [], "what a thread does must not hide that training hangs"
    threading.Timer(0.5, gate.set).start()
    saver.finish()
    assert set(reported) == {"saving step 1"} and len(reported) <= 3


def test_a_failure_is_raised_when_the_save_is_finished(tmp_path, monkeypatch):
    saver, engine = prepare(tmp_path, asynchronous=True)

    def full(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RankFile, "write", full)
        saver.save(engine, 1, 8, {})
        with pytest.raises(StorageError, match=r"step 1 was not saved. Rank 0: .*No space left on device"):
            saver.save(engine, 2, 16, {})
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no memory")))
        saver.save(engine, 2, 16, {})
        with pytest.raises(CheckpointError, match=r"Rank 0: MemoryError: no memory"):
            saver.finish()
    assert not saver.pending() and saver.finish() is None
    save(saver, engine, 3)
    assert names(saver.directory) == ["00000003", "latest"]


ROOM = r"\([\d,]+ bytes needed, [\d,]+ bytes free\)"


def refused(saver: Saver, engine: Engine, match: str) -> None:
    """Saving step 2 raises StorageError as `match`, and checkpoint 1 is the only one, untouched."""
    with pytest.raises(StorageError, match=match) as caught:
        save(saver, engine, 2)
    assert caught.value.exit_code == 3 and "Older checkpoints are untouched" in str(caught.value)
    assert names(saver.directory) == ["00000001", "latest"]
    assert Checkpoint.open(saver.directory / "00000001").step == 1


def test_too_little_room_is_rejected_before_anything_is_written(tmp_path, monkeypatch):
    saver, engine = prepare(tmp_path, 1)
    needed = (saver.directory / "00000001" / "rank-00000.safetensors").stat().st_size
    monkeypatch.setattr(os, "mkdir", lambda *_: pytest.fail("something was written"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    match = f"checkpoints: no room for the checkpoint of step 2: {needed:,} bytes needed, {needed - 1:,} bytes free"
    refused(saver, engine, match)
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    assert saver.save(engine, 2, 16, {}) is not None


@together("asynchronous", [False, True])
@together("code", ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO"])
@together("call", ["mkdir", "open", "fsync"])
def test_every_failure_is_named_and_a_later_save_works(tmp_path, monkeypatch, call, code, asynchronous):
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

    monkeypatch.setattr(rank_file, "open_file", lambda path, mode: Short(path, mode))
    refused(saver, engine, rf"[\d,]+ of [\d,]+ bytes were written {ROOM}")
    monkeypatch.undo()
    assert saver.save(engine, 2, 16, {}) is not None


def test_nothing_is_written_below_an_unmounted_run_folder(tmp_path):
    run, said = tmp_path / "run", list[str]()
    run.mkdir()
    (run / LOCK_FILE).write_text("host a, pid 1, since then")
    saver, engine = prepare(run, 1)
    metrics = JsonLines(run / "metrics.jsonl", said.append)
    metrics.append({"step": 1})
    run.rename(tmp_path / "elsewhere")
    for below in (False, True):  # the folder below the mount point may have one of the same name
        if below:
            run.mkdir()
        metrics.append({"step": 2})
        assert len(said) == 1 and "No such file" in said[0]
        with pytest.raises(StorageError, match=r"\.lock does not belong to this run: is its file system mounted\?"):
            save(saver, engine, 2)
        assert sorted(tmp_path.glob("run/*")) == []


def test_a_folder_that_vanishes_is_named(tmp_path):
    saver, engine = prepare(tmp_path, 1)

    def vanish(doing: str) -> None:
        for path in saver.directory.glob(".tmp-*"):
            shutil.rmtree(path)

    saver.hooks = RunHooks(alive=vanish)
    refused(saver, engine, rf"manifest.json: No such file or directory {ROOM}")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_continues_to_the_next_interval_if_configured(tmp_path, monkeypatch, capsys, asynchronous):
    """On two ranks, of which the second cannot write: both continue, and both have the next checkpoint."""
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
