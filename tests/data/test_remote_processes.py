"""Several processes that share one cache of shards: started together, killed, stopped."""

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

from megasparse.data import remote
from megasparse.data.index import Index
from megasparse.data.reader import ShardReader
from megasparse.data.remote import ShardCache
from megasparse.errors import DataError
from tests.data.folders import largest, ramp, wait_until, write_folder

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
SHARDS = 5
Reader = subprocess.Popen[str]


@pytest.fixture
def folder(tmp_path):
    """Five shards of about 120 kB."""
    return write_folder(tmp_path / "data", [ramp(40_000 + 500 * k, 7 * k, 11 + k) % 256 for k in range(SHARDS)])


def want(folder: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.tar")))).hexdigest()


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


def test_processes_of_a_machine_fetch_each_shard_once(folder, server, tmp_path):
    server.pause = 0.02
    with readers(3, server.url, tmp_path / "cache") as processes:
        for process in processes:
            go(process)
        assert [result(process) for process in processes] == [want(folder)] * 3
    assert server.count() == SHARDS
    assert len(list((tmp_path / "cache").iterdir())) == SHARDS + 1


def test_processes_share_a_cache_that_is_too_small_for_the_data(folder, server, tmp_path):
    """Each holds two shards open and fetches a third; nobody's is deleted while it is read."""
    limit = 4 * largest(folder)
    with readers(2, server.url, tmp_path / "cache", limit) as processes:
        for process in processes:
            go(process)
        assert [result(process) for process in processes] == [want(folder)] * 2
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    assert kept <= limit and server.count() >= SHARDS


@pytest.mark.parametrize("kills", [1, 3])
def test_a_killed_process_leaves_what_it_has_to_the_next(folder, server, tmp_path, kills):
    server.pause = 0.05
    cache = tmp_path / "cache"
    with readers(kills + 1, server.url, cache) as processes:
        for process in processes[:-1]:
            before = partial_bytes(cache)
            go(process)
            wait_until(lambda before=before: partial_bytes(cache) > before)
            process.send_signal(signal.SIGKILL)
            process.wait()
        server.pause = 0.0
        go(processes[-1])
        assert result(processes[-1]) == want(folder)
    first = [begin for file, begin in server.gets if file == "train-000000.tar"]
    assert len(first) == kills + 1 and first[0] is None and all(first[1:]), first
    assert server.count() == SHARDS + kills and not list(cache.glob("*.partial"))


def test_who_waits_takes_over_from_who_is_killed(folder, server, tmp_path):
    server.pause = 0.05
    cache = tmp_path / "cache"
    with readers(2, server.url, cache) as (killed, waiting):
        go(killed)
        wait_until(lambda: partial_bytes(cache) > 0)
        go(waiting)
        time.sleep(0.1)
        killed.kill()
        server.pause = 0.0
        assert result(waiting) == want(folder)
    assert server.count() == SHARDS + 1


def test_who_waits_for_a_stopped_process_gives_up(folder, server, tmp_path, monkeypatch):
    server.pause = 0.05
    cache = tmp_path / "cache"
    index = Index.load(server.url, cache=ShardCache(cache))
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 0.5)
    with readers(1, server.url, cache) as (stopped,):
        go(stopped)
        wait_until(lambda: partial_bytes(cache) > 0)
        os.kill(stopped.pid, signal.SIGSTOP)
        reported: list[str] = []
        with pytest.raises(DataError, match=r"train-000000.tar: .*another process has it, .* nothing came in 0.5 s"):
            ShardReader(index, "train", progress=reported.append).read(0, 0, 10)
        assert len(reported) < 3, "a wait in which nothing comes is no progress"
        server.pause = 0.0
        os.kill(stopped.pid, signal.SIGCONT)
        assert result(stopped) == want(folder)


def test_a_partial_that_nobody_goes_on_with_makes_room(folder, server, tmp_path):
    size = largest(folder)
    cache = ShardCache(tmp_path / "cache", 2 * size)
    cache.folder.mkdir()
    abandoned = cache.folder / f"{'0' * 64}.{size}.partial"
    abandoned.write_bytes(b"some of it")
    stranger = cache.folder / "notes.txt"
    stranger.write_bytes(bytes(3 * size))
    reader = ShardReader(Index.load(server.url, cache=cache), "train", open_files=1)
    reader.read(0, 0, 10)
    assert abandoned.exists(), "there is room for both"
    reader.read(1, 0, 10)
    assert not abandoned.exists() and stranger.exists() and len(list(cache.folder.glob("*.tar"))) == 2
