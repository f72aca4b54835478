"""Atomic writing of checkpoints: after a crash at any time, the newest complete checkpoint can be opened.

All ranks write into one temporary folder and fsync every file. The manifest is written last, and a rename makes the
complete checkpoint visible. Before a checkpoint is deleted, it is renamed.

In an asynchronous save, a thread writes a copy of this rank's file while training continues. All communication between
ranks stays in the training thread.
"""

import errno
import json
import os
import shutil
import sys
import threading
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megasparse.errors import CheckpointError, StorageError, TrainingError, UserError
from megasparse.files import LOCK_FILE, read_file
from megasparse.system import sync_folder
from megasparse.training.checkpoints.bucket import Uploads
from megasparse.training.checkpoints.checkpoint import Fragment
from megasparse.training.checkpoints.manifest import (
    MANIFEST,
    TEMPORARY,
    RunIdentity,
    build_manifest,
    differences,
    find_newest,
    list_checkpoints,
    read_manifest,
    seal,
)
from megasparse.training.checkpoints.rank_file import RankFile, durable, free_bytes, make_folder
from megasparse.training.ranks import Ranks, RunHooks

UNTOUCHED = "Older checkpoints are untouched"


class StateOwner(Protocol):
    """Owner of weights and optimizer state, such as an engine."""

    def fragments(self) -> list[Fragment]:
        """Return the fragments that this rank saves."""

    def steps_done(self) -> int:
        """Return the number of optimizer updates applied so far."""


@dataclass(eq=False)
class Saver:
    """Writer of a run's checkpoints. It keeps the newest `checkpoint.keep` and the best one.

    best: step of the best checkpoint. saved: step of the newest one.
    """

    run: RunIdentity
    ranks: Ranks
    hooks: RunHooks = field(default_factory=RunHooks)
    best: int | None = field(default=None, init=False)
    saved: int | None = field(default=None, init=False)
    _under_way: "_Save | None" = field(default=None, init=False)
    _blocks: list[Tensor] = field(default_factory=list, init=False)
    """Memory of `RankFile.copy` for asynchronous saves."""

    def __post_init__(self) -> None:
        self.config, self.directory = self.run.config, self.run.checkpoints
        self._uploads = Uploads(self.config, self.ranks, self.hooks)
        self._mark = self._read_mark()

    def save(self, engine: StateOwner, step: int, sequences: int, state: dict[str, Any]) -> Path | None:
        """Write the checkpoint of `step`. All ranks call it, and all get its path.

        With `checkpoint.asynchronous`, first finish the previous save, then return None as soon as the state is copied;
        `finish` completes the save. On every rank, raises StorageError if a rank could not write (with
        `checkpoint.on_failure` "continue", warns and returns None), TrainingError if a number is not finite,
        CheckpointError if the ranks disagree on the arguments; the attempt is deleted. sequences: position in the data.
        state: JSON.
        """
        self.finish()
        try:
            save, file = self._agree(engine, step, sequences, state)
        except StorageError as error:
            self._go_on_without(error)
            return None
        self._under_way = save
        if not self.config.checkpoint.asynchronous:
            save.write(file, lambda: self.hooks.alive(save.doing))
            return self.finish()
        if (copied := save.attempt(lambda: file.copy(self._blocks))) is not None:
            save.write_in_thread(copied)
        return None

    def replace_state(self, state: dict[str, Any]) -> None:
        """Replace the state of the newest checkpoint, unless it is in another run's folder."""
        save = _Save(self.directory, self.ranks.rank, self.saved or 0, 0, state)
        if self.ranks.rank == 0 and save.final.is_dir():
            manifest = save.final / MANIFEST
            save.attempt(lambda: self._replace(manifest, seal(read_manifest(save.final) | {"state": state})))
        self._refuse(save, self.ranks.gather(save.problem))

    def pending(self) -> bool:
        return self._under_way is not None and self._under_way.writing()

    def finish(self) -> Path | None:
        """Complete the save in progress: wait for all ranks' threads and queue the upload. All ranks call it, and all
        get its path. Raises as `save` does.
        """
        save, self._under_way = self._under_way, None
        if save is None:
            return None
        save.join(self.hooks.alive)
        self.hooks.progress(f"step {save.step}: saved, waiting for the other ranks")
        try:
            self._refuse(save, self.ranks.gather(save.problem))
            parts = self.ranks.gather(save.part, first_only=True)
            if self.ranks.rank == 0:
                save.attempt(lambda: self._publish(save, parts))
            self._refuse(save, self.ranks.gather(save.problem))
        except StorageError as error:
            self._go_on_without(error)
            return None
        self.saved = save.step
        self._uploads.check()
        return save.final

    def begin_uploads(self) -> None:
        """Claim `checkpoint.bucket` for this run, and upload the best and the newest checkpoint in the background. All
        ranks call it.
        """
        paths = list_checkpoints(self.directory)
        paths = [path for path in paths if path == paths[-1] or int(path.name) == self.best]
        if self.config.checkpoint.bucket is not None:
            self.ranks.on_first_rank(lambda: self._uploads.start(paths, self.best))

    def finish_uploads(self) -> None:
        """Wait for all uploads. All ranks call it. Raises, on every rank, StorageError if an upload failed,
        CheckpointError if another run uploads to the same bucket.
        """
        self._uploads.check(wait=True)
        if self.ranks.rank == 0 and self.config.checkpoint.bucket and (newest := find_newest(self.directory)):
            self._tidy(newest)  # checkpoints that could not be deleted while they were being uploaded

    def _agree(self, engine: StateOwner, step: int, sequences: int, state: dict[str, Any]) -> "tuple[_Save, RankFile]":
        """Start a save if all ranks call it with the same arguments and it fits; else raise on all."""
        save = _Save(self.directory, self.ranks.rank, step, sequences, state)
        file = save.attempt(lambda: self._prepare(save, engine))
        arguments = {"step": step, "sequences": sequences, "state": state}
        room = [save.bytes, save.free]
        reports = self.ranks.gather(
            {"arguments": arguments, "name": save.temporary.name, "room": room, "problem": save.problem}
        )
        save.temporary = self.directory / reports[0]["name"]
        if unlike := differences([report["arguments"] for report in reports]):
            raise CheckpointError(self.directory, f"the ranks disagree on the checkpoint: {unlike}", UNTOUCHED)
        self._refuse(save, [report["problem"] for report in reports])
        save.bytes, free = sum(report["room"][0] for report in reports), reports[0]["room"][1]
        if save.bytes > free:
            problem = f"no room for the checkpoint of step {step}: {save.bytes:,} bytes needed, {free:,} bytes free"
            raise StorageError(self.directory, problem, f"{UNTOUCHED}. Free some space")
        assert file is not None
        return save, file

    def _read_mark(self) -> bytes | None:
        with suppress(OSError):
            return read_file(self.directory.parent / LOCK_FILE)
        return None

    def _prepare(self, save: "_Save", engine: StateOwner) -> RankFile:
        if self._read_mark() != self._mark:
            problem = f"{self.directory.parent / LOCK_FILE} does not belong to this run: is its file system mounted?"
            raise OSError(errno.ESTALE, problem, str(self.directory))
        if os.path.lexists(save.final):
            raise CheckpointError(save.final, "exists already", "Choose another run.directory, or move it elsewhere")
        file = RankFile(engine.fragments())
        save.bytes, save.free = file.bytes, free_bytes(self.directory)
        save.part |= {"bytes": file.bytes, "pieces": file.pieces}
        save.optimizer_steps = engine.steps_done()
        return file

    def _publish(self, save: "_Save", parts: list[dict[str, Any]]) -> None:
        progress = {"step": save.step, "sequences": save.sequences, "state": save.state}
        progress |= {"optimizer_steps": save.optimizer_steps, "world_size": self.ranks.world_size}
        text = seal(build_manifest(self.run, parts, **progress)).encode()
        with durable(save.temporary / MANIFEST, len(text)) as file:
            file.write(text)
        sync_folder(save.temporary)
        os.rename(save.temporary, save.final)
        try:
            sync_folder(self.directory)
        except OSError:
            os.rename(save.final, save.temporary)  # _refuse deletes it
            raise
        self._tidy(save.final)
        self._uploads.begin(save.final, self.best)

    def _replace(self, path: Path, content: str) -> None:
        """Replace a file atomically, through a temporary one in the folder of checkpoints."""
        temporary, text = self.directory / f"{TEMPORARY}{path.name}-{uuid.uuid4().hex}", content.encode()
        try:
            with durable(temporary, len(text)) as file:
                file.write(text)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _tidy(self, newest: Path) -> None:
        """Update `latest` and delete the oldest checkpoints. The save is complete: failures only print a warning."""
        try:
            self._replace(self.directory / "latest", f"{newest.name}\n")
            older = [path for path in list_checkpoints(self.directory) if int(path.name) < int(newest.name)]
            older = [path for path in older if int(path.name) != self.best]
            for old in older[: max(0, len(older) + 1 - self.config.checkpoint.keep)]:
                if self._uploads.release(old):
                    self.hooks.alive(f"deleting {old}")
                    remove(old)
            remove_leftovers(self.directory)  # from a save that could not clean up after its failure
        except OSError as error:
            print(f"warning: {newest} is saved, but older ones could not be deleted: {error}", file=sys.stderr)

    def _refuse(self, save: "_Save", problems: list[dict[str, str] | None]) -> None:
        reported = [(rank, problem) for rank, problem in enumerate(problems) if problem is not None]
        if not reported:
            return
        if self.ranks.rank == 0:
            shutil.rmtree(save.temporary, ignore_errors=True)
        rank, problem = min(reported, key=lambda report: report[1]["kind"] == "storage")  # other faults first
        text = f"the checkpoint of step {save.step} was not saved. Rank {rank}: {problem['text']}"
        if problem["kind"] == "numbers":
            hint = "Resume from an older checkpoint, with a lower learning rate"
            raise TrainingError(f"{self.directory}: {text}. {UNTOUCHED}. {hint}")
        if problem["kind"] == "storage":
            raise StorageError(self.directory, text, f"{UNTOUCHED}. Free some space, or repair the storage")
        raise CheckpointError(self.directory, text, UNTOUCHED)

    def _go_on_without(self, error: StorageError) -> None:
        """Raise `error`, or print a warning if `checkpoint.on_failure` is "continue"."""
        if self.config.checkpoint.on_failure == "stop":
            raise error
        self.ranks.say(f'warning: no checkpoint was saved (checkpoint.on_failure="continue"): {error}')


class _Save:
    """State of a save in progress, on one rank."""

    def __init__(self, directory: Path, rank: int, step: int, sequences: int, state: dict[str, Any]):
        self.step, self.sequences = step, sequences
        self.state: dict[str, Any] = json.loads(json.dumps(state))  # a copy, because training changes the state
        self.temporary = directory / f"{TEMPORARY}{step:08d}-{uuid.uuid4().hex}"
        self.final = directory / f"{step:08d}"
        self.doing = f"saving step {step}"
        self.bytes = self.free = self.optimizer_steps = 0
        self.part: dict[str, Any] = {"file": f"rank-{rank:05d}.safetensors"}
        self.problem: dict[str, str] | None = None
        """`kind` ("storage", "numbers" or "other") and `text`."""
        self._thread: threading.Thread | None = None
        self._blocks = 0

    def attempt(self, work: Callable[[], Any]) -> Any:
        """Run `work`. An exception becomes this rank's problem, reported to all ranks, which would wait for it."""
        try:
            return work()
        except OSError as error:
            path = error.filename or self.temporary
            room = f"{self.bytes:,} bytes needed"
            with suppress(OSError):
                room += f", {free_bytes(self.temporary):,} bytes free"
            self.problem = {"kind": "storage", "text": f"{path}: {error.strerror or error} ({room})"}
        except UserError as error:
            self.problem = {"kind": "numbers" if isinstance(error, TrainingError) else "other", "text": str(error)}
        except Exception as error:
            traceback.print_exc()
            self.problem = {"kind": "other", "text": f"{type(error).__name__}: {error}"}
        return None

    def write(self, file: RankFile, progress: Callable[[], None]) -> None:
        self.attempt(lambda: make_folder(self.temporary))
        if self.problem is None:
            self.part["sha256"] = self.attempt(lambda: file.write(self.temporary / self.part["file"], progress))

    def write_in_thread(self, file: RankFile) -> None:
        """Write this rank's file in a thread, whose progress would hide hangs of training."""

        def count() -> None:
            self._blocks += 1

        self._thread = threading.Thread(target=self.write, args=(file, count), name=self.doing, daemon=True)
        self._thread.start()

    def writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self, progress: Callable[[str], None]) -> None:
        reported = -1
        while self._thread is not None and self._thread.is_alive():
            if reported != self._blocks:
                reported = self._blocks
                progress(self.doing)
            self._thread.join(0.1)


def remove(path: Path) -> None:
    """Delete a checkpoint, renaming it first so that no partly deleted checkpoint is visible."""
    doomed = path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex}")
    path.rename(doomed)
    _delete(doomed)


def remove_leftovers(directory: Path) -> None:
    """Delete temporary folders of interrupted saves and deletions. Failures only warn."""
    try:
        for path in directory.iterdir() if directory.is_dir() else ():
            if path.name.startswith(TEMPORARY):
                _delete(path)
    except OSError as error:
        print(f"warning: files of an interrupted save could not be deleted: {error}", file=sys.stderr)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
