"""Uploads of a run's checkpoints to `checkpoint.bucket`, beside training; and what a run on another machine fetches.

Rank 0 uploads for all ranks, whose files it sees in the run's folder; all ranks hear of what fails.
"""

import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasparse.callbacks import Progress
from megasparse.config.schema import RunSettings
from megasparse.errors import CheckpointError, StorageError
from megasparse.training.checkpoints.run_folder import find_newest, list_checkpoints
from megasparse.training.ranks import Ranks, RunHooks

if TYPE_CHECKING:
    from megasparse.training.checkpoints.bucket import Bucket

POLL = 0.1


class Uploads:
    """At most one upload at a time, in a thread of rank 0. Without `checkpoint.bucket` no method does anything."""

    def __init__(self, config: RunSettings, ranks: Ranks, hooks: RunHooks):
        self._settings, self._ranks, self._hooks = config.checkpoint, ranks, hooks
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        self._name = f"{socket.gethostname()}, pid {os.getpid()}, since {now}, {uuid.uuid4().hex[:8]}"
        self._thread: threading.Thread | None = None
        self._problem: CheckpointError | None = None
        self._doing, self._pieces = "", 0

    def begin_run(self, newest: Path | None, best: int | None) -> None:
        """Claim the bucket for this run, and upload the newest checkpoint if it is not there; all ranks call it.

        Raises CheckpointError or StorageError, the same on every rank, where the bucket cannot be written.
        """
        if self._settings.bucket is None:
            return

        def claim() -> None:
            _bucket(self._settings.bucket, self._hooks.alive).claim(self._name)
            if newest is not None:
                self.begin(newest, best)

        on_first_rank(self._ranks, claim)

    def begin(self, path: Path, best: int | None) -> None:
        """Begin to upload a checkpoint; rank 0 calls it. One that is under way is waited for."""
        if self._settings.bucket is None:
            return
        self.wait()

        def work() -> None:
            try:
                bucket = _bucket(self._settings.bucket, self._count)
                bucket.upload(path, self._name)
            except CheckpointError as error:
                self._problem = error
                return
            except OSError as error:
                self._problem = StorageError(path, f"cannot be read ({error.strerror})", "Repair the storage")
                return
            try:
                bucket.tidy(int(path.name), self._settings.keep, best)
            except CheckpointError as error:
                print(f"warning: older checkpoints could not be deleted: {error}", file=sys.stderr)

        self._thread = threading.Thread(target=work, name=f"uploading {path.name}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the upload that is under way; rank 0 calls it. Its progress is reported."""
        reported = -1
        while self._thread is not None and self._thread.is_alive():
            if reported != self._pieces:
                reported = self._pieces
                self._hooks.alive(self._doing)
            self._thread.join(POLL)
        self._thread = None

    def check(self, wait: bool = False) -> None:
        """Raise, the same on every rank, what uploads have failed of since the last call; all ranks call it. Where
        `checkpoint.on_failure` is "continue", storage that fails is only reported. wait: for the one under way, before.
        """
        if self._settings.bucket is None:
            return

        def raise_problem() -> None:
            if wait:
                self.wait()
            problem, self._problem = self._problem, None
            if isinstance(problem, StorageError) and self._settings.on_failure == "continue":
                print(f"warning: going on, as checkpoint.on_failure says: {problem}", file=sys.stderr)
            elif problem is not None:
                raise problem

        on_first_rank(self._ranks, raise_problem)

    def _count(self, doing: str) -> None:
        self._doing = doing
        self._pieces += 1


def newest_anywhere(config: RunSettings) -> int | None:
    """The step of the newest checkpoint of a run, in its folder or in its bucket. Raises what a Bucket does."""
    local = find_newest(Path(config.run.directory) / "checkpoints")
    steps = [int(local.name)] if local else []
    if config.checkpoint.bucket is not None:
        steps += [step for step in [_bucket(config.checkpoint.bucket).newest()] if step is not None]
    return max(steps, default=None)


def fetch_newest(config: RunSettings, directory: Path, ranks: Ranks, hooks: RunHooks, resume: str) -> None:
    """Fetch the bucket's newest checkpoint into `directory` where that has none as new, and the run's best one with it.
    All ranks call it. resume: see `find_start`.

    Raises, the same on every rank, what a Bucket does; CheckpointError where the bucket's newest is later than what
    `resume` asks for, since going on from there would make it another story.
    """
    if config.checkpoint.bucket is None:
        return

    def fetch() -> None:
        bucket = _bucket(config.checkpoint.bucket, hooks.alive)
        newest, here = bucket.newest(), find_newest(directory)
        if newest is None:
            return
        if resume != "auto":
            _refuse_later(f"{bucket.url}/{newest:08d}", newest, resume)
        elif here is None or int(here.name) < newest:
            print(f"fetching {bucket.url}/{newest:08d}, the newest checkpoint of this run", file=sys.stderr)
            best = _best(bucket.manifest(newest))
            known = {int(each.name) for each in list_checkpoints(directory)}
            if best is not None and best not in {newest, *known} and bucket.has(best):
                bucket.fetch(best, directory)
            bucket.fetch(newest, directory)  # last: were it there alone, nobody would look for the best one

    on_first_rank(ranks, fetch)


def on_first_rank(ranks: Ranks, work: Callable[[], None]) -> None:
    """Do `work` on rank 0, which the others wait for; a CheckpointError of it is raised on every rank."""
    problem = None
    if ranks.rank == 0:
        try:
            work()
        except CheckpointError as error:
            problem = {"storage": isinstance(error, StorageError), "said": [error.path, error.problem, error.hint]}
    if (problem := ranks.gather(problem)[0]) is not None:
        raise (StorageError if problem["storage"] else CheckpointError)(*problem["said"])


def _refuse_later(place: str, newest: int, resume: str) -> None:
    if resume == "never":
        hint = "Choose another checkpoint.bucket, or leave --resume out to go on"
        raise CheckpointError(place, "a new run would overwrite this one", hint)
    name = Path(resume).name
    if not name.isdecimal() or int(name) < newest:
        hint = "Move it away, choose another checkpoint.bucket, or leave --resume out to go on from it"
        raise CheckpointError(place, f"is later than {resume}, the checkpoint to go on from", hint)


def _best(manifest: dict[str, Any]) -> int | None:
    selection = manifest.get("state", {}).get("selection")
    best = selection.get("step") if isinstance(selection, dict) else None
    return best if isinstance(best, int) else None


def _bucket(url: str | None, progress: Progress = lambda doing: None) -> "Bucket":
    from megasparse.training.checkpoints.bucket import Bucket  # fsspec, which only runs with a bucket need

    assert url is not None
    return Bucket(url, progress)
