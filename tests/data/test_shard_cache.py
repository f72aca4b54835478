"""The cache of fetched shards: its limit, what goes first, faults of its disk, and processes that share it."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megasparse.data import remote
from megasparse.data.index import Index
from megasparse.data.index_file import Shard
from megasparse.data.reader import ShardReader
from megasparse.data.remote import ShardCache
from megasparse.errors import ConfigError, DataError
from tests.data.folders import do, everything, flip, largest, ramp, wait_until, write_folder
from tests.helpers.shard_server import serving

pytestmark = pytest.mark.usefixtures("impatient")
SHARDS = 6
FIRST = "train-000000.tar"


def test_a_copy_that_was_damaged_is_fetched_again(folder, server, cache):
    want = everything(Index.load(folder))
    assert torch.equal(everything(Index.load(server.url, cache=cache)), want)
    one, two, *_ = sorted(cache.folder.glob("*.tar"))
    do(flip(700), one)
    os.truncate(two, 100)
    assert torch.equal(everything(Index.load(server.url, cache=ShardCache(cache.folder))), want)
    assert server.count() == SHARDS + 2


def test_a_cache_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "file").write_text("")
    index = Index.load(server.url, cache=ShardCache(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"file/cache: the cache of shards cannot be used: .*Set data.cache"):
        ShardReader(index, "train").read(0, 0, 10)


def test_a_full_disk_is_named_and_not_asked_again(server, remote, monkeypatch):

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DataError, match=r"partial: what is fetched cannot be written: No space left.*Make room"):
        ShardReader(remote, "train").read(0, 0, 10)
    assert server.count() == 1


def test_a_shard_that_is_larger_than_the_limit_is_an_error(server, tmp_path):
    index = Index.load(server.url, cache=ShardCache(tmp_path / "cache", 5000))
    with pytest.raises(ConfigError, match=r"^data.cache_gb: .*train-000000.tar alone has .* bytes.*Raise it"):
        ShardReader(index, "train").read(0, 0, 10)
    assert server.count() == 0


def test_the_limit_holds_and_what_was_not_used_for_longest_goes_first(folder, server, tmp_path):
    size = (folder / FIRST).stat().st_size
    assert len({path.stat().st_size for path in folder.glob("*.tar")}) <= 2
    cache = ShardCache(tmp_path / "cache", 3 * largest(folder) + size // 2)
    remote = Index.load(server.url, cache=cache)
    shards = remote.split("train").shards
    reader = ShardReader(remote, "train", open_files=1)

    def kept() -> set[int]:
        return {number for number, shard in enumerate(shards) if cache.path(shard).exists()}

    for shard in (0, 1, 2, 0):
        reader.read(shard, 0, 10)
    assert kept() == {0, 1, 2}
    reader.read(3, 0, 10)
    assert kept() == {0, 2, 3}, "1 was not used for longest"
    reader.read(4, 0, 10)
    assert kept() == {0, 3, 4}
    holding = ShardReader(remote, "train", open_files=3)
    for shard in (4, 0, 3):
        holding.read(shard, 0, 10)
    reader.close()
    with pytest.raises(ConfigError, match=r"data.cache_gb: .* bytes of it are in use. Raise it, or lower data.shuffle"):
        reader.read(5, 0, 10)
    assert kept() == {0, 3, 4} and torch.equal(holding.read(4, 0, 10), ShardReader(remote, "train").read(4, 0, 10))
    holding.close()
    everything_read = [reader.read(number, 0, shard.tokens) for number, shard in enumerate(shards)]
    local = ShardReader(Index.load(folder), "train")
    assert all(torch.equal(tokens, local.read(k, 0, len(tokens))) for k, tokens in enumerate(everything_read))
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= cache.limit


def test_what_is_fetched_ahead_costs_none_of_what_is_needed_before(folder, server, tmp_path):
    cache = ShardCache(tmp_path / "cache", 2 * largest(folder))
    remote = Index.load(server.url, cache=cache)
    first, second, third, *_ = remote.split("train").shards
    folder_ahead = remote.remote
    assert folder_ahead is not None

    def ahead(shard: Shard, keep: list[Shard]) -> bool:
        return cache.fetch_ahead(shard, folder_ahead / shard.file, keep, print)

    for shard in (first, second):
        assert ahead(shard, [first, second, third])
    assert not ahead(third, [first, second, third])
    assert cache.path(first).exists() and cache.path(second).exists() and server.count() == 2
    assert ahead(third, [second, third])
    assert not cache.path(first).exists() and cache.path(second).exists()


READ_ALL = """
import hashlib, os, sys
from megasparse.data.index_file import IndexFile, parse_content
from megasparse.data.remote import RemoteFolder
from megasparse.data.remote import ShardCache
url, cache, limit = sys.argv[1:]
folder = RemoteFolder(url, ShardCache(cache, int(limit)))
index = parse_content(folder.read_index(), url, IndexFile)
print("ready", flush=True)
sys.stdin.readline()
held, digest = [], hashlib.sha256()
for shard in index.splits["train"].shards:
    while len(held) > 1:
        os.close(held.pop(0))
    held.append(folder.open(shard))
    digest.update(os.pread(held[-1], shard.bytes, 0))
print(digest.hexdigest(), flush=True)
"""
LARGE_SHARDS = 5
Reader = subprocess.Popen[str]


@pytest.fixture
def large_folder(tmp_path):
    """Five shards of about 120 kB."""
    return write_folder(tmp_path / "data", [ramp(40_000 + 500 * k, 7 * k, 11 + k) % 256 for k in range(LARGE_SHARDS)])


@pytest.fixture
def large_server(large_folder):
    with serving(large_folder) as server:
        yield server


def digest_of(large_folder: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(large_folder.glob("*.tar")))).hexdigest()


@contextmanager
def readers(count: int, url: str, cache: Path, limit: int = 10**9) -> Iterator[list[Reader]]:
    """Processes that have the index, and read everything once `go` is called."""
    command = [sys.executable, "-c", READ_ALL, url, str(cache), str(limit)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def go(process: Reader) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def result(process: Reader) -> str:
    return process.communicate(timeout=300)[0].strip()


def partial_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("*.partial"))


def test_processes_of_a_machine_fetch_each_shard_once(large_folder, large_server, tmp_path):
    large_server.pause = 0.02
    with readers(3, large_server.url, tmp_path / "cache") as processes:
        for process in processes:
            go(process)
        assert [result(process) for process in processes] == [digest_of(large_folder)] * 3
    assert large_server.count() == LARGE_SHARDS
    assert len(list((tmp_path / "cache").iterdir())) == LARGE_SHARDS + 1


@pytest.mark.slow
def test_processes_share_a_cache_that_is_too_small_for_the_data(large_folder, large_server, tmp_path):
    """Each holds two shards open and fetches a third; nobody's is deleted while it is read."""
    limit = 4 * largest(large_folder)
    with readers(2, large_server.url, tmp_path / "cache", limit) as processes:
        for process in processes:
            go(process)
        assert [result(process) for process in processes] == [digest_of(large_folder)] * 2
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    assert kept <= limit and large_server.count() >= LARGE_SHARDS


def test_killed_processes_leave_what_they_have_to_the_next(large_folder, large_server, tmp_path):
    kills = 2
    large_server.pause = 0.05
    cache = tmp_path / "cache"
    with readers(kills + 1, large_server.url, cache) as processes:
        for process in processes[:-1]:
            before = partial_bytes(cache)
            go(process)
            wait_until(lambda before=before: partial_bytes(cache) > before)
            process.send_signal(signal.SIGKILL)
            process.wait()
        large_server.pause = 0.0
        go(processes[-1])
        assert result(processes[-1]) == digest_of(large_folder)
    first = [begin for file, begin in large_server.gets if file == "train-000000.tar"]
    assert len(first) == kills + 1 and first[0] is None and all(first[1:]), first
    assert large_server.count() == LARGE_SHARDS + kills and not list(cache.glob("*.partial"))


@pytest.mark.slow
def test_who_waits_takes_over_from_who_is_killed(large_folder, large_server, tmp_path):
    large_server.pause = 0.05
    cache = tmp_path / "cache"
    with readers(2, large_server.url, cache) as (killed, waiting):
        go(killed)
        wait_until(lambda: partial_bytes(cache) > 0)
        go(waiting)
        time.sleep(0.1)
        killed.kill()
        large_server.pause = 0.0
        assert result(waiting) == digest_of(large_folder)
    assert large_server.count() == LARGE_SHARDS + 1


@pytest.mark.slow
def test_who_waits_for_a_stopped_process_gives_up(large_folder, large_server, tmp_path, monkeypatch):
    large_server.pause = 0.05
    cache = tmp_path / "cache"
    index = Index.load(large_server.url, cache=ShardCache(cache))
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 0.5)
    with readers(1, large_server.url, cache) as (stopped,):
        go(stopped)
        wait_until(lambda: partial_bytes(cache) > 0)
        os.kill(stopped.pid, signal.SIGSTOP)
        reported: list[str] = []
        with pytest.raises(DataError, match=r"train-000000.tar: .*another process has it, .* nothing came in 0.5 s"):
            ShardReader(index, "train", progress=reported.append).read(0, 0, 10)
        assert len(reported) < 3, "a wait in which nothing comes is no progress"
        large_server.pause = 0.0
        os.kill(stopped.pid, signal.SIGCONT)
        assert result(stopped) == digest_of(large_folder)


def test_a_partial_that_nobody_goes_on_with_makes_room(large_folder, large_server, tmp_path):
    size = largest(large_folder)
    cache = ShardCache(tmp_path / "cache", 2 * size)
    cache.folder.mkdir()
    abandoned = cache.folder / f"{'0' * 64}.{size}.partial"
    abandoned.write_bytes(b"some of it")
    stranger = cache.folder / "notes.txt"
    stranger.write_bytes(bytes(3 * size))
    reader = ShardReader(Index.load(large_server.url, cache=cache), "train", open_files=1)
    reader.read(0, 0, 10)
    assert abandoned.exists(), "there is room for both"
    reader.read(1, 0, 10)
    assert not abandoned.exists() and stranger.exists() and len(list(cache.folder.glob("*.tar"))) == 2
