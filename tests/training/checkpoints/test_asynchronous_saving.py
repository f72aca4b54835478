"""Saving while training goes on: the same checkpoint as a synchronous save, whatever training does meanwhile."""

import threading
import time
from typing import Any

import pytest
import torch

from megasparse.errors import CheckpointError, StorageError
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import list_checkpoints
from megasparse.training.checkpoints.rank_file import RankFile
from megasparse.training.ranks import RunHooks
from tests.helpers.tiny import train_steps
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
