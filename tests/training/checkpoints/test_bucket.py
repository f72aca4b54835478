"""Checkpoints in a bucket: complete or absent after any failure, and usable from another machine."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megasparse.config.schema import Config
from megasparse.data import urls
from megasparse.errors import CheckpointError, ConfigError, StorageError
from megasparse.files import silent
from megasparse.settings.checks import check
from megasparse.training.checkpoints import bucket as bucket_module
from megasparse.training.checkpoints.bucket import Bucket
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import MANIFEST, list_checkpoints
from megasparse.training.checkpoints.resume import find_start
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines.contract import Engine
from megasparse.training.loop import train
from megasparse.training.ranks import Ranks
from megasparse.training.state import Selection
from tests.helpers.cases import together
from tests.helpers.faulty_store import OPERATIONS, FaultyStore
from tests.helpers.ranks_in_threads import run_in_threads
from tests.helpers.tiny import identity_of, metrics, tiny_config, tiny_engine, tiny_run
from tests.training.checkpoints.test_saving import Killed

URL = "memory://bucket/run"
FILE = "rank-00000.safetensors"


@pytest.fixture
def store(monkeypatch):
    """A store without faults so far. Attempts follow each other without a pause."""
    store = FaultyStore()
    store.store.clear()
    monkeypatch.setitem(urls.STORES, "memory", ("fsspec", "fsspec"))
    for module in (urls, bucket_module):
        monkeypatch.setattr(module, "store", lambda scheme: store)
    monkeypatch.setattr(urls, "LONGEST_PAUSE", 0.0)
    return store


def config_of(folder: Path, **checkpoint: Any) -> Config:
    return tiny_config(folder, checkpoint={"keep": 2, "bucket": URL, **checkpoint})


def prepare(folder: Path, *saved: int, ranks: Ranks = Ranks(), **checkpoint: Any) -> tuple[Saver, Engine]:  # noqa: B008
    """The saver and the engine of a run that has saved, and uploaded, these steps."""
    config = config_of(folder, **checkpoint)
    saver, engine = Saver(identity_of(config), ranks), tiny_engine(config, ranks)
    saver.begin_uploads()
    save(saver, engine, *saved)
    return saver, engine


def save(saver: Saver, engine: Engine, *steps: int) -> None:
    for step in steps:
        saver.save(engine, step, step * 8, {})
    saver.finish_uploads()


def start(folder: Path, resume: str = "auto", **checkpoint: Any) -> Checkpoint | None:
    return find_start(identity_of(config_of(folder, **checkpoint)), Ranks(), resume=resume)


def in_bucket(store: FaultyStore) -> list[str]:
    return [path.removeprefix("/bucket/run/") for path in store.files()]


def checkpoints(*steps: int) -> list[str]:
    return [f"{step:08d}/{name}" for step in steps for name in (MANIFEST, FILE)]


def test_the_newest_and_the_best_are_in_the_bucket_as_on_the_disk(store, tmp_path):
    saver, engine = prepare(tmp_path)
    saver.save(engine, 1, 8, {})
    saver.best = 1
    save(saver, engine, 2, 3, 4)
    assert in_bucket(store) == [*checkpoints(1, 3, 4), "latest", "owner"]
    assert [path.name for path in list_checkpoints(saver.directory)] == ["00000001", "00000003", "00000004"]
    for path in list_checkpoints(saver.directory):
        for file in path.iterdir():
            assert store.cat_file(f"{URL}/{path.name}/{file.name}") == file.read_bytes()


def test_training_never_waits_for_an_upload_and_the_queue_follows_the_disk(store, tmp_path):
    saver, engine = prepare(tmp_path)
    gate = threading.Event()
    store.faults.append((f"put_file .*{FILE}", gate))
    saves = threading.Thread(target=lambda: [saver.save(engine, step, step * 8, {}) for step in (1, 2, 3, 4)])
    saves.start()
    saves.join(30)
    waiting, names = saves.is_alive(), [path.name for path in list_checkpoints(saver.directory)]
    uploaded = in_bucket(store)
    gate.set()
    saves.join()
    saver.finish_uploads()
    assert not waiting, "saved, while the upload of the first stands still"
    assert names == ["00000001", "00000003", "00000004"] and uploaded == ["owner"]
    assert [path.name for path in list_checkpoints(saver.directory)] == ["00000003", "00000004"]
    assert in_bucket(store) == [*checkpoints(3, 4), "latest", "owner"]


def test_nothing_is_uploaded_after_a_fatal_error(store, tmp_path):
    saver, engine = prepare(tmp_path)
    gate = threading.Event()
    store.faults = [("cat_file", gate), ("put_file", PermissionError("AccessDenied"))]
    for step in (1, 2):
        saver.save(engine, step, step * 8, {})
    gate.set()
    with pytest.raises(CheckpointError, match="AccessDenied"):
        saver.finish_uploads()
    assert in_bucket(store) == ["owner"]


@pytest.mark.parametrize("method", ["upload", "tidy"])
def test_a_bug_in_the_thread_of_uploads_is_raised(store, tmp_path, monkeypatch, method):
    saver, engine = prepare(tmp_path)
    monkeypatch.setattr(Bucket, method, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(saver, engine, 1)


def test_a_start_uploads_the_best_and_the_newest_that_are_missing(store, tmp_path):
    prepare(tmp_path, 1, 2, 3, bucket=None, keep=3)
    saver, _ = prepare(tmp_path / "unused")
    saver.directory, saver.best = tmp_path / "checkpoints", 1
    saver.begin_uploads()
    saver.finish_uploads()
    assert in_bucket(store) == [*checkpoints(1, 3), "latest", "owner"]
    assert store.cat_file(f"{URL}/latest") == b"00000003\n"


def test_whenever_a_run_dies_a_checkpoint_is_complete_or_absent(store, tmp_path, monkeypatch):
    """Before each operation of an upload and of the deletions after it, in turn."""
    saver, _ = prepare(tmp_path / "run", 1, 2, 3, bucket=None)
    paths = {int(path.name): path for path in list_checkpoints(saver.directory)}
    moment, ended, outcomes = 0, False, []
    while not ended:
        store.store.clear()
        store.before = lambda operation: None
        bucket = Bucket(URL, silent)
        bucket.claim("a run")
        bucket.upload(paths[2], "a run")
        count = iter(range(moment, -1, -1))

        def die(operation: str, count: Any = count) -> None:
            if next(count) == 0:
                raise Killed

        store.before = die
        try:
            bucket.upload(paths[3], "a run")
            bucket.tidy(3, 1, None)
            ended = True
        except (Killed, StopIteration):
            pass
        store.before = lambda operation: None
        newest = max(Bucket(URL, silent).steps())
        bucket.fetch(newest, tmp_path / str(moment))
        assert Checkpoint.open(tmp_path / str(moment) / f"{newest:08d}").step == newest
        outcomes.append(newest)
        bucket.upload(paths[3], "a run")  # the next start
        bucket.tidy(3, 1, None)
        assert in_bucket(store) == [*checkpoints(3), "latest", "owner"]
        moment += 1
    assert moment > 10 and outcomes == sorted(outcomes) and set(outcomes) == {2, 3}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failed_request_is_retried(store, tmp_path, operation, capsys):
    faults = ["cut", ConnectionError("refused"), TimeoutError("too slow")]
    store.faults = [(f"^{operation} ", fault) for fault in faults]
    prepare(tmp_path / "run", 1, 2, 3)
    assert in_bucket(store) == [*checkpoints(2, 3), "latest", "owner"]
    result = start(tmp_path / "other machine")
    assert result.step == 3 and not store.faults
    assert capsys.readouterr().err.count("again in") >= 2


def test_a_lasting_bucket_failure_ends_the_run_and_the_next_start_uploads_the_rest(store, tmp_path):
    saver, engine = prepare(tmp_path)
    store.faults = [("put_file", OSError("down"))] * 8
    with pytest.raises(StorageError, match=rf"^{URL}/00000001/{FILE}: uploading failed: down, at attempt 8") as caught:
        save(saver, engine, 1)
    assert caught.value.exit_code == 3
    assert [path.name for path in list_checkpoints(saver.directory)] == ["00000001"]
    store.store.clear()
    config = config_of(tmp_path)
    with tiny_run(config) as run:
        run.saver.begin_uploads()
        run.saver.finish_uploads()
    assert in_bucket(store) == [*checkpoints(1), "latest", "owner"]


def test_a_failed_upload_is_a_warning_if_configured(store, tmp_path, capsys):
    saver, engine = prepare(tmp_path, on_failure="continue")
    store.faults = [("put_file", OSError("down"))] * 8
    save(saver, engine, 1, 2)
    assert "warning: upload failed" in capsys.readouterr().err
    assert in_bucket(store) == [*checkpoints(2), "latest", "owner"]


def test_a_rejected_request_is_not_retried(store, tmp_path):
    saver, engine = prepare(tmp_path)
    store.faults = [("put_file", PermissionError("AccessDenied"))]
    with pytest.raises(CheckpointError, match=r"the store answers: AccessDenied.*permissions of the credentials"):
        save(saver, engine, 1)
    assert not store.faults


def test_every_rank_hears_of_a_failure(store, tmp_path):
    def work(ranks: Ranks) -> None:
        saver, engine = prepare(tmp_path, ranks=ranks)
        if ranks.rank == 0:
            store.faults = [("put_file", OSError("down"))] * 8
        saver.save(engine, 1, 8, {})
        saver.finish_uploads()

    errors = run_in_threads(work)
    assert [type(error) for error in errors] == [StorageError] * 2 and str(errors[0]) == str(errors[1])


def test_another_machine_resumes_from_the_bucket_and_the_first_one_after_it(store, tmp_path):
    buckets = {"straight": None, "first": URL, "second": URL}
    runs = {
        name: tiny_config(tmp_path / name, training={"steps": 12}, checkpoint={"every": 2, "keep": 1, "bucket": bucket})
        for name, bucket in buckets.items()
    }

    def go(name: str, stop: int) -> None:
        selection = Selection("train/loss", lower=True)
        with tiny_run(runs[name], stop_at=stop) as run:
            run.selection = selection
            assert train(run).step == stop

    go("straight", 12)
    go("first", 4)
    go("second", 8)
    go("first", 12)
    losses = {name: {line["step"]: line["train/loss"] for line in metrics(config)} for name, config in runs.items()}
    assert losses["first"] | losses["second"] == losses["straight"]
    assert min(losses["second"]) == 5, "it has not begun anew"
    first, straight = (Checkpoint.open(tmp_path / name / "checkpoints" / "00000012") for name in ("first", "straight"))
    assert torch.equal(first.tensor("weight", "out.bias"), straight.tensor("weight", "out.bias"))


def test_the_best_checkpoint_comes_with_the_newest(store, tmp_path):
    saver, engine = prepare(tmp_path / "run", keep=1)
    saver.best = 1
    selection = {"step": 1, "metric": "m", "value": 1.0, "scalars": {}, "without_better": 1}
    for step in (1, 2, 3):
        saver.save(engine, step, step * 8, {"selection": selection})
    saver.finish_uploads()
    assert start(tmp_path / "other machine").step == 3
    result = list_checkpoints(tmp_path / "other machine" / "checkpoints")
    assert [path.name for path in result] == ["00000001", "00000003"]


def test_a_later_run_elsewhere_ends_the_earlier_one(store, tmp_path):
    first, engine = prepare(tmp_path / "first", 1)
    prepare(tmp_path / "second", 2)
    before = {path: store.cat_file(path) for path in store.files()}
    with pytest.raises(CheckpointError, match=r"another run uploads to it \(.* since .*\)") as caught:
        first.save(engine, 2, 16, {"another": "story"})
        first.finish_uploads()
    assert caught.value.exit_code == 2 and {path: store.cat_file(path) for path in store.files()} == before


def test_a_bucket_of_a_later_story_is_not_written_over(store, tmp_path):
    saver, _ = prepare(tmp_path / "run", 1, 2)
    with pytest.raises(CheckpointError, match=rf"{URL}/00000002: is later than .*never, so this run would overwrite"):
        start(tmp_path / "new", "never")
    older = saver.directory / "00000001"
    with pytest.raises(CheckpointError, match=rf"{URL}/00000002: is later than .*{older}"):
        start(tmp_path / "run", str(older))
    assert start(tmp_path / "run", str(older), bucket=f"{URL}/other").step == 1


@pytest.mark.parametrize("name", [FILE, MANIFEST])
def test_changed_objects_of_the_bucket_are_not_used(store, tmp_path, name):
    prepare(tmp_path / "run", 1)
    path = f"{URL}/00000001/{name}"
    content = bytearray(store.cat_file(path))
    content[len(content) // 2] ^= 1
    store.pipe_file(path, bytes(content))
    with pytest.raises(CheckpointError, match=rf"{path}: .*(sha256|cannot be read)"):
        start(tmp_path / "other machine")
    assert list_checkpoints(tmp_path / "other machine" / "checkpoints") == []


def test_a_folder_works_as_a_bucket(tmp_path):
    bucket = (tmp_path / "mounted").as_uri()
    prepare(tmp_path / "run", 1, 2, 3, bucket=bucket)
    left = sorted(str(path.relative_to(tmp_path / "mounted")) for path in (tmp_path / "mounted").rglob("*"))
    assert left == ["00000002", *checkpoints(2), "00000003", *checkpoints(3), "latest", "owner"]
    shutil.rmtree(tmp_path / "run")
    assert start(tmp_path / "other machine", bucket=bucket).step == 3


@together("url", ["bucket/run", "http://host/run", "hf://buckets/me/run", "s3:/bucket"])
def test_an_invalid_bucket_is_rejected_first(url):
    with pytest.raises(ConfigError, match=r"checkpoint.bucket: .* is not a URL .* must start with s3://"):
        check(tiny_config("run", checkpoint={"bucket": url}))
