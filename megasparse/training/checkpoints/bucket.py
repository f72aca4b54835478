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
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from megasparse.config.schema import RunSettings
from megasparse.data.urls import POLL_SECONDS, STORES, Requests, check_url, store, store_answer
from megasparse.errors import CheckpointError, StorageError
from megasparse.files import LARGEST, Progress, read_file, silent, write_file
from megasparse.system import sync_folder
from megasparse.training.checkpoints.manifest import (
    MANIFEST,
    TEMPORARY,
    list_checkpoints,
    parse_manifest,
)
from megasparse.training.checkpoints.rank_file import durable, make_folder
from megasparse.training.ranks import Ranks, RunHooks

T = TypeVar("T")


class Bucket:
    """The checkpoints below a URL. Methods raise StorageError if the store fails, CheckpointError
    if it denies access.
    """

    def __init__(self, url: str, progress: Progress = silent):
        self.url, self._system = check_url(url, [*STORES, "file"]), store(urlsplit(url).scheme)
        self._requests = Requests(progress, errors=(StorageError, CheckpointError))

    def steps(self) -> list[int]:
        return [step for step in self._folders() if MANIFEST in self._names(f"{step:08d}")]

    def manifest(self, step: int) -> tuple[dict[str, Any], bytes]:
        """Return the manifest of a complete checkpoint, parsed and as it is stored."""
        content = self._read(f"{step:08d}/{MANIFEST}") or b""
        return parse_manifest(content, f"{self.url}/{step:08d}/{MANIFEST}"), content

    def fetch(self, step: int, directory: Path) -> None:
        manifest, content = self.manifest(step)
        temporary = directory / f"{TEMPORARY}{step:08d}-{uuid.uuid4().hex}"
        try:
            make_folder(temporary)
            for name, file in sorted(manifest["files"].items()):
                with durable(temporary / name, file["bytes"]) as out:
                    self._requests.fetch(f"{self.url}/{step:08d}/{name}", out, file["bytes"], file["sha256"])
            write_file(temporary / MANIFEST, content)
            os.rename(temporary, directory / f"{step:08d}")
            sync_folder(directory)
        except OSError as error:
            raise StorageError(error.filename or directory, str(error.strerror), "Free space, or repair it") from None

    def claim(self, name: str) -> None:
        """Write the name of the run that uploads from now on."""
        self._write("owner", name.encode())

    def upload(self, path: Path, name: str) -> None:
        """Upload a checkpoint for the run `name`, unless the bucket contains the same one."""
        manifest = f"{path.name}/{MANIFEST}"
        content, uploaded = read_file(path / MANIFEST), self._read(manifest)
        if uploaded == content:
            return
        self._require_owner(name)
        if uploaded is not None:
            self._remove(path.name)
        for file in sorted(json.loads(content)["files"]):
            self._upload(path / file, f"{path.name}/{file}")
        self._require_owner(name)
        self._write(manifest, content)
        self._write("latest", f"{path.name}\n".encode())

    def tidy(self, newest: int, keep: int, best: int | None) -> None:
        """Delete checkpoints before the `keep` newest up to `newest`, except the best, and interrupted uploads."""
        complete = [step for step in self.steps() if step < newest and step != best]
        retained = {best, *complete[max(0, len(complete) + 1 - keep) :]}
        for step in self._folders():
            if step < newest and step not in retained:
                self._remove(f"{step:08d}")

    def _folders(self) -> list[int]:
        return sorted(int(name) for name in self._names() if re.fullmatch("[0-9]{8,}", name))

    def _names(self, folder: str = "") -> set[str]:
        def names(url: str) -> set[str]:
            self._system.invalidate_cache()
            return {str(path).rstrip("/").rpartition("/")[2] for path in self._system.ls(url, detail=False)}

        return self._ask("listing", folder, names, set())

    def _read(self, file: str) -> bytes | None:
        return self._ask("reading", file, lambda url: bytes(self._system.cat_file(url, end=LARGEST)), None)

    def _write(self, file: str, content: bytes) -> None:
        def write(url: str) -> None:
            if not url.startswith("file://"):
                self._system.pipe_file(url, content)
                return
            path = Path(urlsplit(url).path)  # fsspec's file would be visible before it is complete
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, content)

        self._ask("uploading", file, write)

    def _upload(self, path: Path, file: str) -> None:
        from fsspec.callbacks import Callback  # only buckets need fsspec

        sent = Callback(hooks={"sent": lambda *_, **__: self._requests.progress(f"uploading {self.url}/{file}")})
        self._ask("uploading", file, lambda url: self._system.put_file(str(path), url, callback=sent))

    def _remove(self, folder: str) -> None:
        self._ask("deleting", f"{folder}/{MANIFEST}", self._system.rm_file, None)
        self._ask("deleting", folder, lambda url: self._system.rm(url, recursive=True), None)

    def _require_owner(self, name: str) -> None:
        if (owner := self._read("owner")) != name.encode():
            problem = f"another run uploads to it ({(owner or b'nobody').decode(errors='replace')!a})"
            hint = "Stop one of the two, or choose another checkpoint.bucket and run.directory"
            raise CheckpointError(self.url, problem, hint)

    def _ask(self, doing: str, path: str, call: Callable[[str], T], *absent: T) -> T:
        """Return the store's answer for the URL of `path`, or `absent` for a missing file."""
        url = f"{self.url}/{path}".rstrip("/")
        self._requests.progress(f"{doing} {url}")
        return self._requests.send(doing, url, lambda: store_answer(lambda: call(url), *absent))


class Uploads:
    """Queue of uploads, processed by a thread of rank 0. Without `checkpoint.bucket` methods do nothing."""

    def __init__(self, config: RunSettings, ranks: Ranks, hooks: RunHooks):
        self._settings, self._ranks, self._hooks = config.checkpoint, ranks, hooks
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        self._name = f"{socket.gethostname()}, pid {os.getpid()}, since {now}, {uuid.uuid4().hex[:8]}"
        self._lock = threading.Lock()
        self._queue: list[tuple[Path, int | None]] = []
        """Checkpoints, with the best step at the time of the save; the first is being uploaded."""
        self._problem: Exception | None = None
        self._signs = (0, "")  # of progress; replaced as one

    def start(self, paths: list[Path], best: int | None) -> None:
        """Claim the bucket and upload missing checkpoints. Rank 0 calls it."""
        Bucket(str(self._settings.bucket), self._hooks.alive).claim(self._name)
        for path in paths:
            self.begin(path, best)

    def begin(self, path: Path, best: int | None) -> None:
        if self._settings.bucket is not None:
            with self._lock:
                self._queue.append((path, best))
                if len(self._queue) == 1:
                    threading.Thread(target=self._upload_all, daemon=True).start()

    def release(self, path: Path) -> bool:
        """Remove a checkpoint that will be deleted from the queue; False while it is being uploaded."""
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
        problem = "upload failed"
        try:
            bucket = Bucket(str(self._settings.bucket), self._count)
            bucket.upload(path, self._name)
            problem = "older checkpoints could not be deleted"
            bucket.tidy(int(path.name), self._settings.keep, best)
        except Exception as error:  # of any type, for `check` to raise
            if isinstance(error, OSError):
                error = StorageError(path, f"cannot be read ({error.strerror})", "Repair the storage")
            may_fail = isinstance(error, StorageError) and self._settings.on_failure == "continue"
            if may_fail or (problem != "upload failed" and isinstance(error, CheckpointError)):
                with suppress(OSError):  # a terminal that is gone
                    print(f"warning: {problem}: {error}", file=sys.stderr)
            else:
                self._problem = error

    def _count(self, doing: str) -> None:
        self._signs = (self._signs[0] + 1, doing)

    def check(self, wait: bool = False) -> None:
        """Raise the failure that ended the uploads, on every rank; all ranks call it. wait: first wait for the queued
        uploads.
        """

        def raise_problem() -> None:
            reported = 0
            while wait and self._queue:
                if self._signs[0] != reported:
                    reported, doing = self._signs
                    self._hooks.alive(doing)
                time.sleep(POLL_SECONDS)
            if self._problem is not None:
                raise self._problem

        if self._settings.bucket is not None:
            self._ranks.on_first_rank(raise_problem)


def fetch_newest(config: RunSettings, directory: Path, ranks: Ranks, hooks: RunHooks, resume: str) -> None:
    """Download the bucket's newest checkpoint into `directory` if it is newer, and the run's best one. All ranks call
    it. Raises CheckpointError if the newest one is later than the step of `resume`, which would fork the run.
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
