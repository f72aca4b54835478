"""Folders of shards in a bucket, by s3fs: on an endpoint that fails on request, and on moto's."""

import sys

import pytest
import s3fs
import torch

from megasparse.data.index import Index
from megasparse.data.reader import ShardReader
from megasparse.errors import DataError
from tests.data.folders import everything, ramp, write_folder
from tests.helpers.shard_server import serving

pytestmark = pytest.mark.usefixtures("impatient")
SECOND = "train-000001.tar"


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "data", [ramp(30_000 + 900 * k, 7 * k, 11 + k) % 256 for k in range(3)])


def environment(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Credentials as a user sets them, and none of this machine's."""
    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**names, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")


@pytest.fixture
def server(folder, monkeypatch):
    """Answers of an S3-compatible server to HEAD and GET of an object, and nothing more of S3."""
    s3fs.S3FileSystem.clear_instance_cache()
    with serving(folder) as server:
        environment(monkeypatch, server.url.removesuffix("/data"))
        yield server


@pytest.mark.parametrize(
    "faults",
    [[], [500, 503], ["cut", "cut"], ["stall"], ["wrong"], ["refuse"], [500, "cut", "stall", "wrong", "refuse"]],
    ids=lambda faults: " ".join(map(str, faults)) or "none",
)
def test_what_is_read_from_a_bucket_is_what_the_folder_has(folder, server, cache, faults):
    index = Index.load("s3://bucket/data", cache=cache)
    assert index.fingerprint == Index.load(folder).fingerprint
    server.faults[SECOND].extend(faults)
    assert torch.equal(everything(index), everything(Index.load(folder)))
    asked = sum(file == SECOND for file, _ in server.gets)
    assert asked == 1 + len(faults) or ("stall" in faults and asked > 1 + len(faults))


@pytest.mark.parametrize(
    ("faults", "problem"), [([500] * 8, "at attempt 8"), (["stall"] * 8, "at attempt 8"), (["wrong"] * 2, "its sha256")]
)
def test_a_bucket_that_does_not_recover_is_named(server, cache, faults, problem):
    index = Index.load("s3://bucket/data", cache=cache)
    server.faults[SECOND].extend(faults)
    with pytest.raises(DataError, match=problem) as caught:
        ShardReader(index, "train").read(1, 0, 10)
    assert caught.value.path == f"s3://bucket/data/{SECOND}" and str(caught.value).isprintable()


def test_an_object_that_is_missing_is_not_asked_for_again(folder, server, cache):
    index = Index.load("s3://bucket/data", cache=cache)
    (folder / SECOND).unlink()
    with pytest.raises(DataError, match=rf"^s3://bucket/data/{SECOND}: .*S3 answers.*Check the URL"):
        ShardReader(index, "train").read(1, 0, 10)


def test_missing_credentials_are_reported(server, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(DataError, match=r"^s3://bucket/data/index.json: .*S3 wants credentials, in the environment"):
        Index.load("s3://bucket/data")


def test_a_missing_library_is_one_error_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(DataError, match=r"s3fs is not installed. Run: pip install 'megasparse\[remote\]'"):
        Index.load("s3://bucket/data")


@pytest.mark.soak
def test_buckets_of_an_independent_server_of_s3(folder, cache, monkeypatch):
    """Needs `pip install 'moto[server]'`: S3 as others have written it, with its signatures, errors and listings."""
    from moto.server import ThreadedMotoServer  # not among what `dev` installs: it brings 45 packages

    s3fs.S3FileSystem.clear_instance_cache()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        environment(monkeypatch, f"http://{host}:{port}")
        bucket = s3fs.S3FileSystem()
        bucket.mkdir("shards")
        bucket.put(str(folder), "shards/a/data", recursive=True)
        index = Index.load("s3://shards/a/data/", cache=cache)
        assert torch.equal(everything(index), everything(Index.load(folder)))
        for url in ("s3://shards/none", "s3://no-bucket/data"):
            with pytest.raises(DataError, match=rf"^{url}/index.json: .*S3 answers"):
                Index.load(url)
    finally:
        server.stop()
