"""A copy of a run's checkpoints in object storage, by fsspec: `checkpoint.bucket`.

    BUCKET/00000500/rank-00000.safetensors    as in RUN/checkpoints
    BUCKET/00000500/manifest.json             written last, deleted first: without it there is no checkpoint
    BUCKET/latest                             the newest, where a store lists late what was written
    BUCKET/owner                              the run that writes there

Nothing can be renamed there, and nothing locked: a run that begins puts its name into `owner`, and one that finds
another's name there ends.

Rank 0 uploads for all ranks, beside training; all ranks hear of what fails.
"""

import json
import os
import re
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from megasparse.callbacks import Progress, silent
from megasparse.config.schema import RunSettings
from megasparse.data.files import replacing, sync_folder
from megasparse.data.urls import FetchError, GaveUp, asked, check_url, fetch_bytes, fetch_file, object_store, retried
from megasparse.errors import CheckpointError, DataError, StorageError
from megasparse.training.checkpoints.manifest import (
    LARGEST_MANIFEST,
    MANIFEST,
    TEMPORARY,
    find_newest,
    list_checkpoints,
    parse_manifest,
)
from megasparse.training.checkpoints.rank_file import durable, free_bytes, make_folder
from megasparse.training.ranks import Ranks, RunHooks

LATEST, OWNER = "latest", "owner"
ATTEMPTS = 5
"""Attempts of the store's client for each request, a part of a large file; the whole file is tried again beside that.
"""
SMALL = 1 << 10
"""Bytes of `latest` and `owner`, at most."""
REACH = "Check checkpoint.bucket, and what the credentials here may do; then start again: the run goes on"

T = TypeVar("T")


class Bucket:
    """The checkpoints below a URL. progress: called with what is done whenever some of it is.

    Methods raise StorageError where the store does not answer as it should after several attempts, and CheckpointError
    where it refuses, or holds what is no checkpoint of ours. So does the constructor for a URL that cannot be used.
    """

    def __init__(self, url: str, progress: Progress = silent):
        self._progress = progress
        try:
            self.url = check_url(url, file=True)
            self._system = object_store(url, ATTEMPTS)
        except DataError as error:
            raise CheckpointError(error.path, error.problem, error.hint) from None
        self._scheme = urlsplit(url).scheme

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint. Listings may be late: each is asked for by its own name."""
        steps = self._listed()
        latest = self._read(f"{self.url}/{LATEST}")
        if latest is not None and re.fullmatch(rb"\d{8,}\n", latest):
            steps.add(int(latest))
        return next((step for step in sorted(steps, reverse=True) if self.has(step)), None)

    def has(self, step: int) -> bool:
        """True if the checkpoint of a step is there, complete."""
        return self._size(f"{self._folder(step)}/{MANIFEST}") is not None

    def manifest(self, step: int) -> dict[str, Any]:
        """The manifest of a checkpoint that is there."""
        return self._manifest(step)[0]

    def fetch(self, step: int, directory: Path) -> None:
        """Fetch a checkpoint into a folder of checkpoints, where it appears complete or not at all."""
        manifest, content = self._manifest(step)
        url, temporary = self._folder(step), directory / f"{TEMPORARY}{step:08d}-{uuid.uuid4().hex}"
        size = sum(file["bytes"] for file in manifest["files"].values())
        if (free := free_bytes(directory)) < size:
            problem = f"no room for {url}: {size:,} bytes needed, {free:,} bytes free"
            raise StorageError(directory, problem, "Make room, or choose another run.directory")
        try:
            make_folder(temporary)
            for name, file in sorted(manifest["files"].items()):
                with durable(temporary / name, file["bytes"]) as out, _as_checkpoint_error():
                    target = (temporary / name, out.fileno(), self._progress)
                    fetch_file(f"{url}/{name}", file["bytes"], file["sha256"], *target, listed=MANIFEST)
            with durable(temporary / MANIFEST, len(content)) as out:
                out.write(content)
            sync_folder(temporary)
            os.rename(temporary, directory / f"{step:08d}")
            sync_folder(directory)
        except OSError as error:
            raise StorageError(error.filename or directory, str(error.strerror), "Make room, or repair it") from None

    def claim(self, name: str) -> None:
        """Write the name of the run that uploads from now on; every other ends when it sees that."""
        self._write(f"{self.url}/{OWNER}", name.encode())

    def upload(self, path: Path, name: str) -> None:
        """Upload the checkpoint in a folder, as the run of that name, unless the same one is there. A manifest that is
        there already is deleted first.
        """
        step, content = int(path.name), (path / MANIFEST).read_bytes()
        url = self._folder(step)
        there = self._read(f"{url}/{MANIFEST}", LARGEST_MANIFEST)
        if there == content:
            return
        self._require_owner(name)
        if there is not None:
            self._delete(f"{url}/{MANIFEST}")
        for file in sorted(json.loads(content)["files"]):
            self._upload_file(path / file, f"{url}/{file}")
        self._require_owner(name)
        self._write(f"{url}/{MANIFEST}", content)
        self._write(f"{self.url}/{LATEST}", f"{path.name}\n".encode())

    def tidy(self, newest: int, keep: int, best: int | None) -> None:
        """Delete what is older than the `keep` newest checkpoints up to `newest`, and not the best one. Of steps before
        `newest` also what an interrupted upload left.
        """
        older = sorted(step for step in self._listed() if step < newest and step != best)
        complete = [step for step in older if self.has(step)]
        retained = complete[max(0, len(complete) + 1 - keep) :]
        for step in older:
            if step not in retained:
                self._remove(step)

    def _manifest(self, step: int) -> tuple[dict[str, Any], bytes]:
        url = f"{self._folder(step)}/{MANIFEST}"
        with _as_checkpoint_error():
            content = fetch_bytes(url, LARGEST_MANIFEST, self._progress)
        return parse_manifest(content, url), content

    def _folder(self, step: int) -> str:
        return f"{self.url}/{step:08d}"

    def _listed(self) -> set[int]:
        """Steps of which the store lists anything."""
        return {int(name) for name in self._names(self.url) if re.fullmatch(r"\d{8,}", name)}

    def _names(self, url: str) -> set[str]:
        def names() -> set[str]:
            self._system.invalidate_cache()
            with suppress(FileNotFoundError):
                return {str(name).rstrip("/").rpartition("/")[2] for name in self._system.ls(url, detail=False)}
            return set()

        return self._ask(f"listing {url}", names)

    def _size(self, url: str) -> int | None:
        """Bytes of a file, None where there is none."""

        def size() -> int | None:
            self._system.invalidate_cache()
            with suppress(FileNotFoundError):
                info = self._system.info(url)
                return int(info["size"]) if info["type"] == "file" else None
            return None

        return self._ask(f"looking for {url}", size)

    def _read(self, url: str, most: int = SMALL) -> bytes | None:
        """The content of a small file, None where there is none."""

        def content() -> bytes | None:
            with suppress(FileNotFoundError):
                return bytes(self._system.cat_file(url, end=most))
            return None

        return self._ask(f"reading {url}", content) if self._size(url) is not None else None

    def _write(self, url: str, content: bytes) -> None:
        def write() -> None:
            if self._scheme != "file":
                self._system.pipe_file(url, content)
                return
            with replacing(_made_path(url)) as file:  # a file is seen before it is whole
                file.write(content)

        self._ask(f"uploading {url}", write)

    def _upload_file(self, path: Path, url: str) -> None:
        size = path.stat().st_size

        def upload() -> None:
            if self._scheme == "file":
                _made_path(url)
            from fsspec.callbacks import Callback  # which only runs with a bucket need

            sent = Callback(hooks={"sent": lambda *_, **__: self._progress(f"uploading {url}")})
            self._system.put_file(str(path), url, callback=sent)
            self._system.invalidate_cache()
            if (stored := self._system.info(url)["size"]) != size:
                raise OSError(f"{stored:,} of {size:,} bytes were kept")

        self._ask(f"uploading {url}", upload, size)

    def _delete(self, url: str) -> None:
        def delete() -> None:
            with suppress(FileNotFoundError):
                self._system.rm_file(url)

        self._ask(f"deleting {url}", delete)

    def _remove(self, step: int) -> None:
        url = self._folder(step)
        self._delete(f"{url}/{MANIFEST}")
        for name in sorted(self._names(url) - {MANIFEST, ""}):
            self._delete(f"{url}/{name}")
        if self._scheme == "file":
            with suppress(OSError):
                _made_path(url).rmdir()

    def _require_owner(self, name: str) -> None:
        owner = self._read(f"{self.url}/{OWNER}")
        if owner != name.encode():
            problem = f"another run writes there now ({(owner or b'nobody').decode(errors='replace')!a})"
            hint = "End one of the two, or give this one another checkpoint.bucket and run.directory"
            raise CheckpointError(self.url, problem, hint)

    def _ask(self, doing: str, call: Callable[[], T], size: int = 0) -> T:
        try:
            self._progress(doing)
            return retried(doing, lambda _: asked(self._scheme, call), self._progress, size)
        except GaveUp as error:
            kind = CheckpointError if error.refused else StorageError
            raise kind(self.url, f"{doing}: {error}", REACH) from None


def _made_path(url: str) -> Path:
    """The path of a file:// URL, whose folder is made."""
    path = Path(urlsplit(url).path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Fetching raises errors of data: here they are those of a checkpoint."""
    try:
        yield
    except DataError as error:
        refused = isinstance(error, FetchError) and error.refused
        raise (CheckpointError if refused else StorageError)(error.path, error.problem, error.hint) from None


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
        if (url := self._settings.bucket) is None:
            return

        def claim() -> None:
            Bucket(url, self._hooks.alive).claim(self._name)
            if newest is not None:
                self.begin(newest, best)

        on_first_rank(self._ranks, claim)

    def begin(self, path: Path, best: int | None) -> None:
        """Begin to upload a checkpoint; rank 0 calls it. One that is under way is waited for."""
        if (url := self._settings.bucket) is None:
            return
        self.wait()

        def work() -> None:
            try:
                bucket = Bucket(url, self._count)
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
        steps += [step for step in [Bucket(config.checkpoint.bucket).newest()] if step is not None]
    return max(steps, default=None)


def fetch_newest(config: RunSettings, directory: Path, ranks: Ranks, hooks: RunHooks, resume: str) -> None:
    """Fetch the bucket's newest checkpoint into `directory` where that has none as new, and the run's best one with it.
    All ranks call it. resume: see `find_start`.

    Raises, the same on every rank, what a Bucket does; CheckpointError where the bucket's newest is later than what
    `resume` asks for, since going on from there would make it another story.
    """
    if (url := config.checkpoint.bucket) is None:
        return

    def fetch() -> None:
        bucket = Bucket(url, hooks.alive)
        newest, local = bucket.newest(), find_newest(directory)
        if newest is None:
            return
        if resume != "auto":
            _refuse_later(f"{bucket.url}/{newest:08d}", newest, resume)
        elif local is None or int(local.name) < newest:
            print(f"fetching {bucket.url}/{newest:08d}, the newest checkpoint of this run", file=sys.stderr)
            best = _best(bucket.manifest(newest))
            local_steps = {int(path.name) for path in list_checkpoints(directory)}
            if best is not None and best not in {newest, *local_steps} and bucket.has(best):
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


def _refuse_later(url: str, newest: int, resume: str) -> None:
    if resume == "never":
        hint = "Choose another checkpoint.bucket, or leave --resume out to go on"
        raise CheckpointError(url, "a new run would overwrite this one", hint)
    name = Path(resume).name
    if not name.isdecimal() or int(name) < newest:
        hint = "Move it away, choose another checkpoint.bucket, or leave --resume out to go on from it"
        raise CheckpointError(url, f"is later than {resume}, the checkpoint to go on from", hint)


def _best(manifest: dict[str, Any]) -> int | None:
    selection = manifest.get("state", {}).get("selection")
    best = selection.get("step") if isinstance(selection, dict) else None
    return best if isinstance(best, int) else None
