"""A copy of a run's checkpoints in object storage, by fsspec: `checkpoint.bucket`.

    BUCKET/00000500/rank-00000.safetensors    as in RUN/checkpoints
    BUCKET/00000500/manifest.json             written last, deleted first; marks a complete checkpoint
    BUCKET/latest                             the newest checkpoint, for people and tools
    BUCKET/owner                              the run that uploads; a run that reads another name stops

Rank 0 uploads for all ranks, in the background; a failure is raised on all ranks.
"""

import json
import os
import re
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from megasparse.config.schema import RunSettings
from megasparse.data.urls import STORES, FetchError, check_url, fetch, retried, store, store_answer
from megasparse.errors import CheckpointError, DataError, StorageError
from megasparse.files import Progress, read_file, silent, sync_folder, write_file
from megasparse.training.checkpoints.manifest import (
    LARGEST_MANIFEST,
    MANIFEST,
    TEMPORARY,
    find_newest,
    list_checkpoints,
    parse_manifest,
)
from megasparse.training.checkpoints.rank_file import durable, make_folder
from megasparse.training.ranks import Ranks, RunHooks

T = TypeVar("T")


class Bucket:
    """The checkpoints below a URL. progress: called repeatedly with the name of the current operation.

    Methods raise StorageError if the store still fails after several attempts, CheckpointError if it denies access.
    """

    def __init__(self, url: str, progress: Progress = silent):
        self._progress, self._is_folder = progress, url.startswith("file://")
        try:
            self.url, self._system = check_url(url, [*STORES, "file"]), store(urlsplit(url).scheme)
        except DataError as error:
            raise CheckpointError(error.path, error.problem, error.hint) from None

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, in order."""
        return [step for step in self._folders() if MANIFEST in self._names(f"{self.url}/{step:08d}")]

    def manifest(self, step: int) -> tuple[dict[str, Any], bytes]:
        """Return the manifest of a complete checkpoint, parsed and as it is stored."""
        url = f"{self.url}/{step:08d}/{MANIFEST}"
        content = self._read(url) or b""
        return parse_manifest(content, url), content

    def fetch(self, step: int, directory: Path) -> None:
        """Download a checkpoint into a folder of checkpoints, atomically."""
        manifest, content = self.manifest(step)
        temporary = directory / f"{TEMPORARY}{step:08d}-{uuid.uuid4().hex}"
        try:
            make_folder(temporary)
            for name, file in sorted(manifest["files"].items()):
                with durable(temporary / name, file["bytes"]) as out, _named():
                    fetch(f"{self.url}/{step:08d}/{name}", out, self._progress, file["bytes"], file["sha256"])
            with durable(temporary / MANIFEST, len(content)) as out:
                out.write(content)
            sync_folder(temporary)
            os.rename(temporary, directory / f"{step:08d}")
            sync_folder(directory)
        except OSError as error:
            raise StorageError(error.filename or directory, str(error.strerror), "Free space, or repair it") from None

    def claim(self, name: str) -> None:
        """Write the name of the run that uploads from now on; any other run stops when it reads the name."""
        self._write(f"{self.url}/owner", name.encode())

    def upload(self, path: Path, name: str) -> None:
        """Upload the checkpoint in a folder for the run `name`, unless the bucket contains the same one."""
        url, content = f"{self.url}/{path.name}", read_file(path / MANIFEST)
        uploaded = self._read(f"{url}/{MANIFEST}")
        if uploaded == content:
            return
        self._require_owner(name)
        if uploaded is not None:
            self._remove(int(path.name))
        for file in sorted(json.loads(content)["files"]):
            self._upload(path / file, f"{url}/{file}")
        self._require_owner(name)
        self._write(f"{url}/{MANIFEST}", content)
        self._write(f"{self.url}/latest", f"{path.name}\n".encode())

    def tidy(self, newest: int, keep: int, best: int | None) -> None:
        """Delete checkpoints before the `keep` newest up to `newest`, except the best one, and interrupted uploads."""
        complete = [step for step in self.steps() if step < newest and step != best]
        retained = {best, *complete[max(0, len(complete) + 1 - keep) :]}
        for step in self._folders():
            if step < newest and step not in retained:
                self._remove(step)

    def _folders(self) -> list[int]:
        return sorted(int(name) for name in self._names(self.url) if re.fullmatch("[0-9]{8,}", name))

    def _names(self, url: str) -> set[str]:
        def names() -> set[str]:
            self._system.invalidate_cache()
            return {str(path).rstrip("/").rpartition("/")[2] for path in self._system.ls(url, detail=False)}

        return self._ask("listing", url, names, set())

    def _read(self, url: str) -> bytes | None:
        """Return the content of a small file, None if there is none."""
        return self._ask("reading", url, lambda: bytes(self._system.cat_file(url, end=LARGEST_MANIFEST)), None)

    def _write(self, url: str, content: bytes) -> None:
        def write() -> None:
            if not self._is_folder:
                self._system.pipe_file(url, content)
                return
            path = Path(urlsplit(url).path)  # fsspec's file would be visible before it is complete
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, content)

        self._ask("uploading", url, write)

    def _upload(self, path: Path, url: str) -> None:
        from fsspec.callbacks import Callback  # only buckets need fsspec

        sent = Callback(hooks={"sent": lambda *_, **__: self._progress(f"uploading {url}")})
        self._ask("uploading", url, lambda: self._system.put_file(str(path), url, callback=sent))

    def _remove(self, step: int) -> None:
        url = f"{self.url}/{step:08d}"
        for name in sorted(self._names(url), key=lambda name: name != MANIFEST):
            path = f"{url}/{name}"
            self._ask("deleting", path, partial(self._system.rm_file, path), None)
        if self._is_folder:
            self._ask("deleting", url, lambda: self._system.rmdir(url), None)

    def _require_owner(self, name: str) -> None:
        owner = self._read(f"{self.url}/owner")
        if owner != name.encode():
            problem = f"another run uploads to it ({(owner or b'nobody').decode(errors='replace')!a})"
            hint = "Stop one of the two, or choose another checkpoint.bucket and run.directory"
            raise CheckpointError(self.url, problem, hint)

    def _ask(self, doing: str, url: str, call: Callable[[], T], *absent: T) -> T:
        """Return the store's answer, or `absent` for a file that does not exist."""

        def attempt() -> T:
            try:
                return call()
            except FileNotFoundError:
                if not absent:
                    raise
                return absent[0]

        self._progress(f"{doing} {url}")
        with _named():
            return retried(doing, url, lambda: store_answer(attempt), self._progress)


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except FetchError as error:
        kind = CheckpointError if error.refused else StorageError
        raise kind(error.path, error.problem, error.hint) from None


class Uploads:
    """Queue of uploads, processed in order by a thread of rank 0. Without `checkpoint.bucket` methods do nothing."""

    def __init__(self, config: RunSettings, ranks: Ranks, hooks: RunHooks):
        self._settings, self._ranks, self._hooks = config.checkpoint, ranks, hooks
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        self._name = f"{socket.gethostname()}, pid {os.getpid()}, since {now}, {uuid.uuid4().hex[:8]}"
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._queue: list[tuple[Path, int | None]] = []
        """Checkpoints, with the best step at the time of the save; the first is being uploaded."""
        self._problem: CheckpointError | None = None
        self._progress = (0, "")

    def begin_run(self, paths: list[Path], best: int | None) -> None:
        """Claim the bucket for this run, and upload the checkpoints that it lacks. All ranks call it.

        Raises CheckpointError or StorageError, on every rank, if the bucket is not writable.
        """

        def claim() -> None:
            Bucket(str(self._settings.bucket), self._hooks.alive).claim(self._name)
            for path in paths:
                self.begin(path, best)

        if self._settings.bucket is not None:
            self._ranks.on_first_rank(claim)

    def begin(self, path: Path, best: int | None) -> None:
        """Append a checkpoint to the queue without waiting. Rank 0 calls it."""
        if self._settings.bucket is not None:
            with self._lock:
                self._queue.append((path, best))
                if len(self._queue) == 1:
                    self._thread = threading.Thread(target=self._upload_all, daemon=True)
                    self._thread.start()

    def release(self, path: Path) -> bool:
        """Remove a checkpoint that will be deleted from the queue. Return False while it is being uploaded."""
        with self._lock:
            self._queue[1:] = [entry for entry in self._queue[1:] if entry[0] != path]
            return path not in [entry[0] for entry in self._queue]

    def _upload_all(self) -> None:
        more = True
        while more:
            self._upload(*self._queue[0])
            with self._lock:  # after the last upload, a new one needs a new thread
                del self._queue[: 1 if self._problem is None else None]
                more = bool(self._queue)

    def _upload(self, path: Path, best: int | None) -> None:
        try:
            bucket = Bucket(str(self._settings.bucket), self._count)
            bucket.upload(path, self._name)
        except (CheckpointError, OSError) as error:
            if isinstance(error, OSError):
                error = StorageError(path, f"cannot be read ({error.strerror})", "Repair the storage")
            if isinstance(error, StorageError) and self._settings.on_failure == "continue":
                print(f'warning: upload failed (checkpoint.on_failure="continue"): {error}', file=sys.stderr)
            else:
                self._problem = error
            return
        try:
            bucket.tidy(int(path.name), self._settings.keep, best)
        except CheckpointError as error:
            print(f"warning: older checkpoints could not be deleted: {error}", file=sys.stderr)

    def _count(self, doing: str) -> None:
        self._progress = (self._progress[0] + 1, doing)

    def wait(self) -> None:
        """Wait for the queued uploads and report their progress. Rank 0 calls it."""
        reported = 0
        while self._thread is not None and self._thread.is_alive():
            if self._progress[0] != reported:
                reported, doing = self._progress
                self._hooks.alive(doing)
            self._thread.join(0.1)

    def check(self, wait: bool = False) -> None:
        """Raise the failure that ended the uploads, on every rank; all ranks call it. With `checkpoint.on_failure`
        "continue", storage failures do not end them. wait: first wait for the queued uploads.
        """

        def raise_problem() -> None:
            if wait:
                self.wait()
            if self._problem is not None:
                raise self._problem

        if self._settings.bucket is not None:
            self._ranks.on_first_rank(raise_problem)


def newest_anywhere(config: RunSettings) -> int | None:
    """Return the step of the newest checkpoint in a run's folder or bucket. Raises the errors of Bucket."""
    local = find_newest(Path(config.run.directory) / "checkpoints")
    steps = [int(local.name)] if local else []
    if config.checkpoint.bucket is not None:
        steps += Bucket(config.checkpoint.bucket).steps()
    return max(steps, default=None)


def fetch_newest(config: RunSettings, directory: Path, ranks: Ranks, hooks: RunHooks, resume: str) -> None:
    """Download the bucket's newest checkpoint into `directory` if it is newer, and the run's best one. All ranks call
    it. resume: see `find_start`.

    Raises the errors of Bucket, on every rank, and CheckpointError if the bucket's newest checkpoint is later than the
    step of `resume`, because resuming from an older step would fork the run.
    """

    def get() -> None:
        bucket = Bucket(str(config.checkpoint.bucket), hooks.alive)
        steps, local = bucket.steps(), [int(path.name) for path in list_checkpoints(directory)]
        newest = max(steps, default=-1)
        if resume != "auto":
            if newest >= 0 and not (Path(resume).name.isdecimal() and int(Path(resume).name) >= newest):
                problem = f"is later than the checkpoint of --resume {resume}, so this run would overwrite it"
                hint = "Move it away, choose another checkpoint.bucket, or omit --resume to resume from it"
                raise CheckpointError(f"{bucket.url}/{newest:08d}", problem, hint)
        elif max(local, default=-1) < newest:
            print(f"fetching {bucket.url}/{newest:08d}, the newest checkpoint of this run", file=sys.stderr)
            best = (bucket.manifest(newest)[0].get("state", {}).get("selection") or {}).get("step")
            if best in steps and best not in (newest, *local):
                bucket.fetch(best, directory)
            bucket.fetch(newest, directory)  # last: after an interruption the next start still fetches the best one

    if config.checkpoint.bucket is not None:
        ranks.on_first_rank(get)
