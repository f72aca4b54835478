"""Folders of shards at URLs and in buckets: what is read is what the local folder has, whatever the server does."""

import hashlib
import os
import threading

import pytest
import s3fs
import torch

from megasparse.data import urls
from megasparse.data.batches import WaitingStopped
from megasparse.data.index import Index
from megasparse.data.reader import ShardReader
from megasparse.errors import DataError
from tests.data.folders import batches, everything, ramp, wait_until, write_folder
from tests.helpers.shard_server import serving

pytestmark = pytest.mark.usefixtures("impatient")
SHARDS = 6
FIRST = "train-000000.tar"


def test_what_is_read_from_a_url_is_what_the_folder_has(folder, server, cache):
    local, remote = Index.load(folder), Index.load(server.url + "/", cache=cache)
    assert remote.fingerprint == local.fingerprint
    assert torch.equal(everything(remote), everything(local))
    assert server.count() == SHARDS and server.count("index.json") == 1
    assert torch.equal(everything(Index.load(server.url, cache=cache)), everything(local))
    assert server.count() == SHARDS, "each shard comes once, also for the next run"
    kept = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in cache.folder.glob("*.tar")}
    assert len(kept) == SHARDS and all(name == f"{digest}.tar" for name, digest in kept.items())
    assert not list(cache.folder.glob("*.partial"))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_steps_from_a_url_are_those_of_the_folder(folder, server, cache, prefetch):
    with batches([(Index.load(folder), 1.0)]) as data:
        want = [next(data).micro_batches for _ in range(120)]  # more than two epochs
    reported: list[str] = []
    with batches([(Index.load(server.url, cache=cache), 1.0)], prefetch=prefetch, alive=reported.append) as data:
        for step in want:
            for mine, theirs in zip(next(data).micro_batches, step, strict=True):
                assert torch.equal(mine.tokens, theirs.tokens) and torch.equal(mine.samples, theirs.samples)
    assert server.count() == SHARDS


FAULTS: dict[str, list[int | str]] = {
    "refused": ["refuse"] * 3,
    "fails": [500, 503, 500, 502, 504, 429, 408],
    "cut, and then it knows no ranges": ["cut", "no ranges"],
    "cut, and then it begins elsewhere": ["cut", "other range"],
    "cut, and then the file is a shorter one": ["cut", "shorter"],
    "too long": ["longer"],
    "too long, and does not say so": ["longer unannounced"],
    "does not say how long": ["unannounced"],
    "all together": [500, "stall", "cut", "wrong", "refuse"],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_a_server_that_recovers_costs_no_token(folder, server, remote, cache, faults, capsys):
    for shard in remote.split("train").shards[1::2]:
        server.faults[shard.file].extend(faults)
    assert torch.equal(everything(remote), everything(Index.load(folder)))
    said = capsys.readouterr().err.splitlines()
    failed = sum(fault not in ("unannounced", "no ranges") for fault in faults)
    least = failed * (SHARDS // 2)
    assert len(said) == least or ("stall" in faults and len(said) > least), said
    assert all(line.startswith(f"fetching {server.url}/") and line.isprintable() for line in said)
    assert len(server.gets) == 1 + SHARDS + len(said)
    assert len(list(cache.folder.iterdir())) == SHARDS + 1


def test_what_came_before_a_cut_is_not_asked_for_again(folder, server, remote):
    size = remote.split("train").shards[0].bytes
    server.faults[FIRST].extend(["cut", "cut"])
    ShardReader(remote, "train").read(0, 0, 10)
    rest = size - size // 2
    wanted = [None, f"bytes={size // 2}-", f"bytes={size - (rest - rest // 2)}-"]
    assert [begin for file, begin in server.gets if file == FIRST] == wanted


FINAL: dict[str, tuple[list[int | str], str, int]] = {
    "missing": ([404], "the server answers 404 (Not Found)", 1),
    "forbidden": ([403], "the server answers 403 (Forbidden)", 1),
    "down for good": ([500] * 8, "the server answers 500 (Internal Server Error), at attempt 8", 8),
    "stalls for good": (["stall"] * 8, "timed out, at attempt 8", 8),
    "other content": (["wrong"] * 2, "index.json says", 2),
    "too long, and does not say so": (["longer unannounced"] * 2, "its sha256 is", 2),
    "too short": (["shorter"] * 2, "index.json says", 2),
    "redirects to itself": (["loop"] * 20, "a redirect without end", 11),
    "redirects to ftp": (["ftp"] * 8, "ftp", 8),
}


@pytest.mark.parametrize(("faults", "problem", "asked"), FINAL.values(), ids=FINAL)
def test_a_server_that_does_not_recover_is_named_and_the_next_start_goes_on(
    folder, server, remote, faults, problem, asked
):
    server.faults[FIRST].extend(faults)
    with batches([(remote, 1.0)], prefetch=1, shuffle_shards=1) as data, pytest.raises(DataError) as caught:
        data.corpora[0]._ahead = None  # it would take the faults from those that are counted here
        for _ in range(100):
            next(data)
    assert caught.value.path == f"{server.url}/{FIRST}" and problem in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value) and "start again" in str(caught.value)
    least = 2 if faults == ["loop"] * 20 else asked
    assert least <= sum(file == FIRST for file, _ in server.gets) <= asked
    server.faults.clear()
    assert torch.equal(everything(remote), everything(Index.load(folder)))


def test_a_server_that_drips_is_given_up(server, remote, monkeypatch):
    monkeypatch.setattr(urls, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(urls, "SLOWEST", 10**9)
    server.faults[FIRST].extend(["drip"] * 8)
    with pytest.raises(DataError, match="it comes too slowly, at attempt 1"):
        ShardReader(remote, "train").read(0, 0, 10)


def test_a_server_that_is_gone_is_named(folder, server, remote, cache):
    reader = ShardReader(remote, "train")
    first = reader.read(0, 0, 100)
    port = server.server_address[1]
    server.shutdown()
    server.server_close()
    assert torch.equal(ShardReader(remote, "train").read(0, 0, 100), first), "what is in the cache needs no server"
    with pytest.raises(DataError, match=rf"{port}/data/train-000001.tar: .*Connection refused"):
        reader.read(1, 0, 100)
    with pytest.raises(DataError, match=rf"{port}/data/index.json: .*Connection refused"):
        Index.load(remote.directory.url, cache=cache)
    with serving(folder, port):
        assert torch.equal(reader.read(1, 0, 100), ShardReader(Index.load(folder), "train").read(1, 0, 100))


@pytest.mark.parametrize(
    ("faults", "problem"),
    [
        ([404], "the server answers 404 (Not Found). Check the URL of the folder"),
        (["cut"] * 8, "the connection ended after"),
        (["wrong"], "it is not the JSON of an index"),
    ],
)
def test_an_index_that_does_not_come_is_named(server, cache, faults, problem):
    server.faults["index.json"].extend(faults)
    with pytest.raises(DataError) as caught:
        Index.load(server.url, cache=cache)
    assert caught.value.path == f"{server.url}/index.json" and problem in str(caught.value)
    assert str(caught.value).isprintable() and not cache.folder.exists()


def test_a_redirect_is_followed_without_what_comes_with_it(server, cache, monkeypatch, capsys):
    monkeypatch.setattr(urls, "STALL_SECONDS", 5.0)
    server.faults["index.json"].append("page")
    assert Index.load(server.url, cache=cache).split("train").shards
    assert server.count("index.json") == 2 and capsys.readouterr().err == "", "no attempt waited for the page"


def test_an_index_is_bounded_in_size(server, cache, monkeypatch):
    monkeypatch.setattr("megasparse.data.remote.MOST_BYTES", 1000)
    for fault in ("longer", "longer unannounced"):
        server.faults["index.json"].append(fault)
        with pytest.raises(DataError, match="more than 1,000 bytes"):
            Index.load(server.url, cache=cache)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("swift://bucket/data", '"swift" is not a kind of URL.*http, https, s3, gs, az, hf'),
        ("file:///etc", '"file" is not a kind of URL'),
        ("ftp://host/data", '"ftp" is not a kind of URL'),
        ("http://user:secret@host/data", r"^http://host/data: .*no user, password"),
        ("http://host/data?token=secret", r"^http://host/data: .*no user, password, query"),
        ("http://host/my data", "this is not a URL"),
        ("http://host/\u00e4", "this is not a URL"),
        ("http:///data", "this is not a URL"),
    ],
)
def test_other_urls_are_refused(url, problem):
    with pytest.raises(DataError, match=problem) as caught:
        Index.load(url)
    assert "secret" not in str(caught.value) and str(caught.value).isprintable()


def test_shards_are_fetched_before_they_are_needed(server, cache):
    data = batches([(Index.load(server.url, cache=cache), 1.0)], shuffle_shards=1, prefetch=0)
    with data:
        next(data)
        order = data.corpora[0].order
        first, second = order.shards_ahead(0)
        assert order.locate(0)[0] == first and order.locate(int(order.sequences[first]))[0] == second
        wait_until(lambda: server.count() >= 2)
        assert {file for file, _ in server.gets[1:]} == {f"train-{shard:06d}.tar" for shard in (first, second)}
    assert server.count() == 2, "and no more than those"


@pytest.mark.parametrize("prefetch", [0, 1])
def test_stopping_ends_a_fetch_that_is_under_way(server, remote, prefetch):
    for shard in remote.split("train").shards:
        server.faults[shard.file].extend(["drip"] * 8)
    data = batches([(remote, 1.0)], prefetch=prefetch, stop_waiting=lambda: True)
    with pytest.raises(WaitingStopped), data:
        next(data)
    assert data._thread is None, "the thread has ended"


@pytest.mark.parametrize("prefetch", [0, 1])
def test_waiting_for_a_slow_server_is_reported_by_the_thread_that_waits(server, remote, prefetch):
    server.pause, server.piece = 0.05, 2000
    reported: list[tuple[str, bool]] = []

    def alive(doing: str) -> None:
        reported.append((doing, threading.current_thread() is threading.main_thread()))

    with batches([(remote, 1.0)], prefetch=prefetch, alive=alive, shuffle_shards=1) as data:
        next(data)
    assert len(reported) >= 3 and all(mine and server.url in doing for doing, mine in reported), reported


@pytest.mark.parametrize("fault", ["longer", "longer unannounced"])
def test_no_byte_more_is_taken_than_the_index_says(server, cache, monkeypatch, fault):
    index, write, ends = Index.load(server.url, cache=cache), os.pwrite, []

    def noting(descriptor: int, piece: bytes, offset: int) -> int:
        ends.append(offset + len(piece))
        return write(descriptor, piece, offset)

    monkeypatch.setattr(os, "pwrite", noting)
    server.faults[FIRST].append(fault)
    ShardReader(index, "train").read(0, 0, 10)
    assert max(ends) == index.split("train").shards[0].bytes


pytestmark = pytest.mark.usefixtures("impatient")
SECOND = "train-000001.tar"


@pytest.fixture
def bucket_folder(tmp_path):
    return write_folder(tmp_path / "data", [ramp(30_000 + 900 * k, 7 * k, 11 + k) % 256 for k in range(3)])


def environment(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Credentials as a user sets them, and none of this machine's."""
    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**names, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")


@pytest.fixture
def bucket(bucket_folder, monkeypatch):
    """Answers of an S3-compatible bucket to HEAD and GET of an object, and nothing more of S3."""
    s3fs.S3FileSystem.clear_instance_cache()
    with serving(bucket_folder) as bucket:
        environment(monkeypatch, bucket.url.removesuffix("/data"))
        yield bucket


@pytest.mark.parametrize(
    "faults",
    [[], [500, "cut", "stall", "wrong", "refuse"]],
    ids=lambda faults: " ".join(map(str, faults)) or "none",
)
def test_what_is_read_from_a_bucket_is_what_the_folder_has(bucket_folder, bucket, cache, faults):
    index = Index.load("s3://bucket/data", cache=cache)
    assert index.fingerprint == Index.load(bucket_folder).fingerprint
    bucket.faults[SECOND].extend(faults)
    assert torch.equal(everything(index), everything(Index.load(bucket_folder)))
    asked = sum(file == SECOND for file, _ in bucket.gets)
    assert asked == 1 + len(faults) or ("stall" in faults and asked > 1 + len(faults))


def test_an_object_that_is_missing_is_not_asked_for_again(bucket_folder, bucket, cache):
    index = Index.load("s3://bucket/data", cache=cache)
    (bucket_folder / SECOND).unlink()
    with pytest.raises(DataError, match=rf"^s3://bucket/data/{SECOND}: .*S3 answers.*Check the URL"):
        ShardReader(index, "train").read(1, 0, 10)


def test_missing_credentials_are_reported(bucket, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(DataError, match=r"^s3://bucket/data/index.json: .*S3 wants credentials, in the environment"):
        Index.load("s3://bucket/data")
