"""Folders of shards at URLs and in buckets, and their cache: the tokens equal the local folder."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import s3fs
import torch

from megasparse.data import index as index_module
from megasparse.data import urls
from megasparse.data.batches import WaitingStopped
from megasparse.data.index import Index
from megasparse.data.reader import ShardReader
from megasparse.data.urls import ShardCache
from megasparse.errors import ConfigError, DataError
from tests.data.folders import batches, do, everything, flip, largest, wait_until
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.shard_server import serving

pytestmark = pytest.mark.usefixtures("impatient")
SHARDS = 6
FIRST = "train-000000.tar"


def test_steps_from_a_url_equal_the_folder(folder, server, cache):
    with batches([(Index.load(folder), 1.0)]) as data:
        expected = [next(data).micro_batches for _ in range(120)]  # more than two epochs
    remote = Index.load(server.url + "/", cache=cache)
    assert remote.fingerprint == Index.load(folder).fingerprint
    with batches([(remote, 1.0)]) as data:
        for step in expected:
            for batch, local in zip(next(data).micro_batches, step, strict=True):
                assert torch.equal(batch.tokens, local.tokens) and torch.equal(batch.samples, local.samples)
    assert torch.equal(everything(Index.load(server.url, cache=cache)), everything(Index.load(folder)))
    assert server.count() == SHARDS, "each shard comes once, also for the next run"
    names = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in cache.folder.glob("*.tar")}
    assert len(names) == SHARDS and all(name == f"{digest}.tar" for name, digest in names.items())
    assert not list(cache.folder.glob("*.partial"))


@pytest.mark.parametrize("faults", [["refuse"] * 2, [500, 503, 429, 408], ["cut"], ["wrong"], ["longer"], ["stall"]])
def test_a_server_that_recovers_costs_no_token(folder, server, remote, cache, faults, capsys):
    for shard in remote.split("train").shards[1::2]:
        server.faults[shard.file].extend(faults)
    assert torch.equal(everything(remote), everything(Index.load(folder)))
    messages = capsys.readouterr().err.splitlines()
    assert len(messages) >= SHARDS // 2 and not any(server.faults.values())
    assert all(line.startswith(f"fetching {server.url}/") and line.isprintable() for line in messages)
    assert len(list(cache.folder.iterdir())) == SHARDS + 1


@pytest.mark.parametrize(
    ("faults", "problem", "gets"),
    [
        ([404], "it does not exist, at attempt 1. Check the URL", 1),
        ([403], "the store answers: 403", 1),
        ([500] * 8, "500 .*, at attempt 8", 8),
        (["wrong"] * 2, "its 40,960 bytes have sha256 .* are expected, at attempt 2", 2),
        (["longer"] * 2, "it has more than 40,960 bytes, at attempt 2", 2),
        (["ftp"] * 8, "ftp", 8),
    ],
)
def test_a_server_that_does_not_recover_is_named_and_the_next_start_resumes(
    folder, server, remote, faults, problem, gets
):
    server.faults[FIRST].extend(faults)
    with pytest.raises(DataError, match=rf"^{server.url}/{FIRST}: fetching failed: .*{problem}") as caught:
        ShardReader(remote, "train").read(0, 0, 10)
    assert str(caught.value).isprintable() and "tart again" in str(caught.value)
    assert server.count(FIRST) == gets
    assert torch.equal(everything(remote), everything(Index.load(folder)))


def test_a_server_that_is_gone_is_named(folder, server, remote, cache):
    first = ShardReader(remote, "train").read(0, 0, 100)
    port = server.server_address[1]
    server.shutdown()
    server.server_close()
    assert torch.equal(ShardReader(remote, "train").read(0, 0, 100), first), "a cached shard needs no server"
    with pytest.raises(DataError, match=rf"{port}/data/train-000001.tar: .*Cannot connect"):
        ShardReader(remote, "train").read(1, 0, 100)
    with serving(folder, port):
        ShardReader(remote, "train").read(1, 0, 100)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [(404, "it does not exist"), ("wrong", "is not the JSON of an index"), ("longer", "more than 100,000 bytes")],
)
def test_an_index_that_does_not_come_is_named(server, cache, monkeypatch, fault, problem):
    monkeypatch.setattr(index_module, "MOST_BYTES", 100_000)
    server.faults["index.json"].append(fault)
    refusal(lambda: Index.load(server.url, cache=cache), match=rf"^{server.url}/index.json: .*{problem}")
    assert not cache.folder.exists()


@together(
    "url",
    [
        *("swift://bucket/data", "file:///etc", "http:///data", "s3://[", "http://host/my data", "http://host/\u00e4"),
        *("http://user:secret@host/data", "http://host/data?token=secret"),
    ],
)
def test_other_urls_are_rejected(url):
    with pytest.raises(DataError, match=r"not a URL that is read here.*http, https, s3, gs, az, hf") as caught:
        Index.load(url)
    assert "secret" not in str(caught.value) and str(caught.value).isprintable()


def test_errors_of_stores_show_no_secret():
    for text in ("500 at https://user:secret@host/x", "no access: https://host/x?X-Amz-Signature=secret&y=secret"):
        with pytest.raises(urls.StoreError, match=r"https://host/x$"):
            urls.store_answer(lambda text=text: (_ for _ in ()).throw(OSError(text)))


def test_shards_are_fetched_before_they_are_needed(server, cache):
    with batches([(Index.load(server.url, cache=cache), 1.0)], shuffle_shards=1) as data:
        data.corpora[0].read(0)
        first, second = data.corpora[0].order.shards_ahead(0)
        wait_until(lambda: server.count() >= 2)
        assert {file for file, _ in server.gets[1:]} == {f"train-{shard:06d}.tar" for shard in (first, second)}
    assert server.count() == 2, "and no more than those"


def test_a_wait_is_reported_by_the_thread_that_waits_and_may_be_stopped(server, remote):
    for shard in remote.split("train").shards:
        server.faults[shard.file].extend(["drip"] * 8)
    reported: list[tuple[str, threading.Thread]] = []

    def alive(doing: str) -> None:
        reported.append((doing, threading.current_thread()))

    data = batches([(remote, 1.0)], stop_waiting=lambda: len(reported) > 3, alive=alive)
    with pytest.raises(WaitingStopped), data:
        next(data)
    assert data._thread is None, "the thread has ended"
    assert all(thread is threading.main_thread() and server.url in doing for doing, thread in reported), reported


# The cache


def test_a_copy_that_was_damaged_is_fetched_again(folder, server, cache):
    expected = everything(Index.load(folder))
    assert torch.equal(everything(Index.load(server.url, cache=cache)), expected)
    one, two, *_ = sorted(cache.folder.glob("*.tar"))
    do(flip(700), one)
    os.truncate(two, 100)
    assert torch.equal(everything(Index.load(server.url, cache=ShardCache(cache.folder))), expected)
    assert server.count() == SHARDS + 2


def test_a_cache_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "file").write_text("")
    index = Index.load(server.url, cache=ShardCache(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"file/cache: the cache of shards cannot be used: .*set data.cache"):
        ShardReader(index, "train").read(0, 0, 10)


def test_the_limit_holds_and_the_least_recently_used_goes_first(folder, server, tmp_path):
    cache = ShardCache(tmp_path / "cache", int(3.5 * largest(folder)))
    remote = Index.load(server.url, cache=cache)
    shards = remote.split("train").shards
    reader = ShardReader(remote, "train", open_files=1)
    cache.folder.mkdir()
    (cache.folder / f"{'0' * 64}.partial").write_bytes(bytes(3 * largest(folder)))  # of a process that was killed
    (cache.folder / "notes.txt").write_bytes(bytes(4 * largest(folder)))

    def cached() -> set[int]:
        return {number for number, shard in enumerate(shards) if cache.path(shard).exists()}

    for shard in (0, 1, 2, 0):
        reader.read(shard, 0, 10)
    assert cached() == {0, 1, 2}
    reader.read(3, 0, 10)
    assert cached() == {0, 2, 3}, "1 is the least recently used"
    holding = ShardReader(remote, "train", open_files=3)
    for shard in (2, 0, 3):
        holding.read(shard, 0, 10)
    with pytest.raises(ConfigError, match=r"data.cache_gb: .* bytes of it are in use. Raise it, or lower data.shuffle"):
        reader.read(5, 0, 10)
    assert cached() == {0, 2, 3}
    holding.close()
    assert not cache.path(shards[5]).exists()
    ahead = [shards[number] for number in (5, 0, 2, 3)]
    refusal(lambda: cache.fetch(shards[5], f"{server.url}/{shards[5].file}", urls.Requests(), ahead), ConfigError)
    reader.read(5, 0, 10)
    assert sum(path.stat().st_size for path in cache.folder.glob("*.tar")) <= cache.limit
    assert {path.suffix for path in cache.folder.iterdir()} == {".tar", ".txt", ""}, "the partial is gone"


READ_ALL = """
import hashlib, sys
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.data.urls import ShardCache
url, cache = sys.argv[1:]
index = Index.load(url, ShardCache(cache))
print("ready", flush=True)
sys.stdin.readline()
stream = EvaluationStream(index, "train")
print(hashlib.sha256(stream.read(0, stream.tokens).numpy().tobytes()).hexdigest(), flush=True)
"""


def test_each_shard_is_fetched_once(folder, server, cache):
    server.pause = 0.005
    expected = everything(Index.load(folder))
    with ThreadPoolExecutor(3) as pool:
        indexes = [Index.load(server.url, ShardCache(cache.folder)) for _ in range(3)]
        assert all(torch.equal(tokens, expected) for tokens in pool.map(everything, indexes))
    assert server.count() == SHARDS


@pytest.mark.slow
def test_processes_fetch_each_shard_once_and_survive_the_end_of_another(folder, server, tmp_path):
    expected = hashlib.sha256(everything(Index.load(folder)).numpy().tobytes()).hexdigest()
    command = [sys.executable, "-c", READ_ALL, server.url, str(tmp_path / "cache")]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    try:
        assert all(process.stdout.readline() == "ready\n" for process in processes)
        server.pause = 1.0
        processes[0].stdin.write("\n")
        processes[0].stdin.flush()
        wait_until(lambda: server.count() == 1)
        processes[0].send_signal(signal.SIGKILL)
        processes[0].wait()
        server.pause = 0.01
        for process in processes[1:]:
            process.stdin.write("\n")
            process.stdin.flush()
        assert [process.communicate(timeout=300)[0].strip() for process in processes[1:]] == [expected] * 2
        assert server.count() == 1 + SHARDS
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# A bucket


@pytest.fixture
def bucket(folder, monkeypatch):
    """Answers of an S3-compatible bucket to HEAD and GET of an object, and nothing more of S3."""
    s3fs.S3FileSystem.clear_instance_cache()
    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    files = {"AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
    with serving(folder) as bucket:
        endpoint = {"AWS_ENDPOINT_URL": bucket.url.removesuffix("/data"), "AWS_EC2_METADATA_DISABLED": "true"}
        for name, value in {**names, **files, **endpoint}.items():
            monkeypatch.setenv(name, value)
        yield bucket


def test_the_tokens_from_a_bucket_equal_the_folder(folder, bucket, cache):
    index = Index.load("s3://bucket/data", cache=cache)
    bucket.faults["train-000001.tar"].extend([500, "cut", "wrong"])
    assert torch.equal(everything(index), everything(Index.load(folder)))
    (folder / FIRST).unlink()
    with pytest.raises(DataError, match=rf"^s3://bucket/data/{FIRST}: .*it does not exist, at attempt 1"):
        ShardReader(Index.load("s3://bucket/data", cache=ShardCache(cache.folder / "x")), "train").read(0, 0, 10)


def test_missing_credentials_are_reported(bucket, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(DataError, match=r"^s3://bucket/data/index.json: .*wants credentials, in the environment"):
        Index.load("s3://bucket/data")
