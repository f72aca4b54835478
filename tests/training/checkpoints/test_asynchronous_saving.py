"""Saving while training goes on: the same checkpoint as a synchronous save, whatever training does meanwhile."""

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from megasparse.errors import CheckpointError, StorageError
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import MANIFEST, list_checkpoints
from megasparse.training.checkpoints.rank_file import RankFile
from megasparse.training.checkpoints.resume import find_start
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.ranks import Ranks, RunHooks
from tests.helpers.ranks_in_threads import run_in_threads
from tests.helpers.run_ranks import ROOT
from tests.helpers.tiny import identity_of, tiny_config, tiny_engine, train_steps
from tests.training.checkpoints.test_saving import before_writing, names, prepare, save

FILE = "rank-00000.safetensors"


@pytest.fixture
def gate(monkeypatch):
    """No rank's file is written before this event."""
    event = threading.Event()
    before_writing(monkeypatch, lambda path: event.wait(600))
    yield event
    event.set()


def test_training_goes_on_and_the_checkpoint_is_that_of_a_synchronous_save(tmp_path, gate):
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


def test_waiting_for_a_save_says_that_it_gets_on_but_only_while_it_does(tmp_path, gate):
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
        patch.setattr(torch.Tensor, "copy_", lambda *_: (_ for _ in ()).throw(MemoryError("no memory for the copy")))
        saver.save(engine, 2, 16, {})
        with pytest.raises(CheckpointError, match=r"Rank 0: MemoryError: no memory for the copy"):
            saver.finish()
    assert not saver.pending() and saver.finish() is None
    save(saver, engine, 3)
    assert names(saver.directory) == ["00000003", "latest"]


def test_on_two_ranks_of_which_one_is_slower(tmp_path, monkeypatch):
    slow = threading.Event()
    before_writing(monkeypatch, lambda path: path.name == FILE or slow.wait(600))
    config = tiny_config(tmp_path, checkpoint={"asynchronous": True})

    def work(ranks: Ranks) -> list[Any]:
        saver, engine = Saver(identity_of(config), ranks), tiny_engine(config, ranks)
        assert saver.save(engine, 1, 8, {}) is None
        while ranks.rank == 0 and saver.pending():
            time.sleep(0.01)
        pending = ranks.gather(saver.pending())
        threading.Timer(0.2, slow.set).start()
        return [pending, str(saver.finish()), saver.pending()]

    path = tmp_path / "checkpoints" / "00000001"
    assert run_in_threads(work) == [[[False, True], str(path), False]] * 2
    assert names(path) == [MANIFEST, FILE, "rank-00001.safetensors"] and Checkpoint.open(path).step == 1


DIES = """if True:
    import os, sys, threading, time
    from pathlib import Path
    from tests.training.checkpoints.test_saving import prepare

    saver, engine = prepare(Path(sys.argv[1]), 1, 2, asynchronous=True)
    reached = threading.Event()
    os.fsync = lambda _: (reached.set(), time.sleep(100_000))
    saver.save(engine, 3, 24, {})
    assert reached.wait(600) and saver.pending()
    if sys.argv[2] == "_exit":
        os._exit(9)
    raise SystemExit(9)
    """


@pytest.mark.slow
@pytest.mark.parametrize("how", ["_exit", "exit"])
def test_the_process_ends_while_its_thread_writes(tmp_path, how):
    ended = subprocess.run([sys.executable, "-c", DIES, str(tmp_path), how], cwd=ROOT, timeout=900)
    assert ended.returncode == 9, "a process that ends waits for no writer"
    saver, engine = prepare(tmp_path)
    assert list(saver.directory.glob(".tmp-00000003-*/rank-00000.safetensors")), "it was to die in the middle"
    start = find_start(saver.run, saver.ranks)
    assert start is not None and start.step == 2
    assert names(saver.directory) == ["00000001", "00000002", "latest"]
    assert saver.save(engine, 3, 24, {}) is not None


SAVES = """if True:
    import sys
    from pathlib import Path
    from tests.training.checkpoints.test_saving import prepare, save

    from megasparse.training.checkpoints.resume import find_start
    saver, engine = prepare(Path(sys.argv[1]), asynchronous=sys.argv[2] == "True", keep=2)
    start = find_start(saver.run, saver.ranks)
    step = start.step if start else 0
    print("ready", flush=True)
    while True:
        step += 1
        save(saver, engine, step)
    """


@pytest.mark.soak
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_complete_checkpoint_is_there_at_all_times(tmp_path, asynchronous, figures):
    """The process is killed while it saves and deletes with keep=2; a watcher opens the checkpoints every 10 ms."""
    directory = tmp_path / "checkpoints"
    kills, looks, missing, ended = 12, 0, [], threading.Event()

    def newest_opens() -> bool:
        for path in reversed(list_checkpoints(directory)):
            try:
                Checkpoint.open(path)
                return True
            except (CheckpointError, OSError):  # deleted, or damaged: the next older one
                continue
        return False

    def hooks() -> None:
        nonlocal looks
        while not ended.wait(0.01):
            looks += 1
            if not newest_opens() and not newest_opens():  # both that it had listed may be old by now
                missing.append(sorted(path.name for path in directory.iterdir()))

    watcher = threading.Thread(target=hooks)
    highest = 0
    for kill in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVES, str(tmp_path), str(asynchronous)], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        if kill == 0:
            while not newest_opens():
                time.sleep(0.01)
            watcher.start()
        time.sleep(0.2 + 0.037 * kill)
        process.kill()
        process.wait()
        complete = [Checkpoint.open(path).step for path in list_checkpoints(directory)]
        assert complete and complete[-1] > highest and len(complete) <= 3
        highest = complete[-1]
    ended.set()
    watcher.join()
    assert missing == [] and looks > 20 * kills
    figures(retention_kills=kills, retention_looks=looks, moments_without_a_checkpoint=len(missing))
