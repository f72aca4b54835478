"""The cache of fetched shards: its limit, what goes first, and faults of its disk."""

import fcntl
import os
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from megasparse.data.index import Index
from megasparse.data.reader import ShardReader
from megasparse.data.remote import ShardCache
from megasparse.errors import ConfigError, DataError
from tests.data.folders import batches, do, everything, flip, largest

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


def test_an_epoch_under_a_small_limit_is_the_same(folder, server, tmp_path):
    cache = ShardCache(tmp_path / "cache", 2 * largest(folder))
    local, remote = (batches([(index, 1.0)]) for index in (Index.load(folder), Index.load(server.url, cache=cache)))
    with local, remote:
        for _ in range(100):
            mine, theirs = (torch.cat([b.tokens for b in next(data).micro_batches]) for data in (remote, local))
            assert np.array_equal(mine, theirs)
            assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= cache.limit


def test_what_is_fetched_ahead_costs_none_of_what_is_needed_before(folder, server, tmp_path):
    cache = ShardCache(tmp_path / "cache", 2 * largest(folder))
    remote = Index.load(server.url, cache=cache)
    first, second, third, *_ = remote.split("train").shards
    assert remote.remote is not None
    for shard in (first, second):
        assert remote.remote.fetch_ahead(shard, [first, second, third], print)
    assert not remote.remote.fetch_ahead(third, [first, second, third], print)
    assert cache.path(first).exists() and cache.path(second).exists() and server.count() == 2
    assert remote.remote.fetch_ahead(third, [second, third], print)
    assert not cache.path(first).exists() and cache.path(second).exists()


def test_what_another_process_deletes_while_room_is_made_is_no_error(server, cache, monkeypatch):
    index, scan = Index.load(server.url, cache=cache), os.scandir
    cache.folder.mkdir()
    (given_up := cache.folder / f"{'0' * 64}.9000.partial").touch()

    @contextmanager
    def late(folder):
        with scan(folder) as files:
            found = list(files)
        given_up.unlink(missing_ok=True)
        yield found

    monkeypatch.setattr(os, "scandir", late)
    reader = ShardReader(index, "train")
    assert len(reader.read(0, 0, 10)) == 10 and not given_up.exists()
    reader.close()


def test_a_shard_gets_its_name_while_nobody_makes_room(server, cache, monkeypatch):
    """Who looks for it, or counts, between its two names would fetch it once more, or take its bytes for free."""
    index, rename, locked = Index.load(server.url, cache=cache), os.rename, []

    def monitored(source, target):
        with (cache.folder / ".lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locked.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", monitored)
    reader = ShardReader(index, "train")
    reader.read(0, 0, 10)
    reader.close()
    assert locked == [cache.path(index.split("train").shards[0])]
