"""Folders of shards at URLs: what is read is what the local folder has, whatever the server does meanwhile."""

import fcntl
import hashlib
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megasparse.data import fetching, urls
from megasparse.data.batches import WaitingStopped
from megasparse.data.index import Index
from megasparse.data.order import Order
from megasparse.data.reader import EvaluationStream, ShardReader
from megasparse.data.shard_cache import ShardCache
from megasparse.errors import ConfigError, DataError
from tests.data.folders import batches, ramp, write_folder
from tests.helpers.shard_server import ShardServer, serving

SHARDS = 6
FIRST = "train-000000.tar"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Short limits where a server is to stall, long ones elsewhere: a busy machine is no stall."""
    faults = getattr(request.node, "callspec", None) and request.node.callspec.params.get("faults", ())
    monkeypatch.setattr(urls, "STALL_SECONDS", 0.3 if "stall" in (faults or ()) else 20.0)
    monkeypatch.setattr(fetching, "LONGEST_PAUSE", 0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six shards of about 9,000 bytes, no two alike."""
    return write_folder(tmp_path / "data", [ramp(3000 + 90 * k, 7 * k, 11 + k) % 256 for k in range(SHARDS)])


@pytest.fixture
def server(folder: Path) -> Iterator[ShardServer]:
    with serving(folder) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(tmp_path / "cache")


def everything(index: Index) -> torch.Tensor:
    stream = EvaluationStream(index, "train")
    try:
        return stream.read(0, stream.tokens)
    finally:
        stream.close()


def test_D6_what_is_read_from_a_url_is_what_the_folder_has(
    folder: Path, server: ShardServer, cache: ShardCache
) -> None:
    local, remote = Index.load(folder), Index.load(server.url + "/", cache=cache)
    assert remote.fingerprint == local.fingerprint
    assert torch.equal(everything(remote), everything(local))
    assert server.count() == SHARDS and server.count("index.json") == 1
    remote.verify()
    assert torch.equal(everything(Index.load(server.url, cache=cache)), everything(local))
    assert server.count() == SHARDS, "each shard comes once, also for the next run"
    kept = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in cache.folder.glob("*.tar")}
    assert len(kept) == SHARDS and all(name == f"{digest}.tar" for name, digest in kept.items())
    assert not list(cache.folder.glob("*.partial"))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_steps_from_a_url_are_those_of_the_folder(
    folder: Path, server: ShardServer, cache: ShardCache, prefetch: int
) -> None:
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
    "cut": ["cut", "cut", "cut"],
    "cut, and then it knows no ranges": ["cut", "no ranges"],
    "cut, and then it begins elsewhere": ["cut", "other range"],
    "cut, and then the file is a shorter one": ["cut", "shorter"],
    "stalls": ["stall", "stall"],
    "other content": ["wrong"],
    "too long": ["longer"],
    "too long, and does not say so": ["longer unannounced"],
    "too short": ["shorter"],
    "does not say how long": ["unannounced"],
    "all together": [500, "stall", "cut", "wrong", "refuse"],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_D6_a_server_that_recovers_costs_no_token(
    folder: Path, server: ShardServer, cache: ShardCache, faults: list[int | str], capsys: pytest.CaptureFixture[str]
) -> None:
    index = Index.load(server.url, cache=cache)
    for shard in index.split("train").shards[1::2]:
        server.faults[shard.file].extend(faults)
    assert torch.equal(everything(index), everything(Index.load(folder)))
    said = capsys.readouterr().err.splitlines()
    failed = sum(fault not in ("unannounced", "no ranges") for fault in faults)
    least = failed * (SHARDS // 2)
    assert len(said) == least or ("stall" in faults and len(said) > least), said
    assert all(line.startswith(f"fetching {server.url}/") and line.isprintable() for line in said)
    assert len(server.gets) == 1 + SHARDS + len(said)
    assert len(list(cache.folder.iterdir())) == SHARDS + 1


def test_what_came_before_a_cut_is_not_asked_for_again(folder: Path, server: ShardServer, cache: ShardCache) -> None:
    index = Index.load(server.url, cache=cache)
    size = index.split("train").shards[0].bytes
    server.faults[FIRST].extend(["cut", "cut"])
    ShardReader(index, "train").read(0, 0, 10)
    rest = size - size // 2
    wanted = [None, f"bytes={size // 2}-", f"bytes={size - (rest - rest // 2)}-"]
    assert [begin for file, begin in server.gets if file == FIRST] == wanted


FINAL: dict[str, tuple[list[int | str], str, int]] = {
    "missing": ([404], "the server answers 404 (Not Found)", 1),
    "forbidden": ([403], "the server answers 403 (Forbidden)", 1),
    "down for good": ([500] * 8, "the server answers 500 (Internal Server Error), at attempt 8", 8),
    "always refused": (["refuse"] * 8, "at attempt 8", 8),
    "stalls for good": (["stall"] * 8, "timed out, at attempt 8", 8),
    "other content": (["wrong"] * 2, "index.json says", 2),
    "too long": (["longer"] * 2, "index.json says", 2),
    "too long, and does not say so": (["longer unannounced"] * 2, "its sha256 is", 2),
    "too short": (["shorter"] * 2, "index.json says", 2),
    "redirects to itself": (["loop"] * 20, "a redirect without end", 11),
    "redirects to ftp": (["ftp"] * 8, "ftp", 8),
}


@pytest.mark.parametrize(("faults", "problem", "asked"), FINAL.values(), ids=FINAL)
@pytest.mark.parametrize("max_damaged", [0.0, 1.0])
def test_D6_a_server_that_does_not_recover_is_named_and_the_next_start_goes_on(
    folder: Path,
    server: ShardServer,
    cache: ShardCache,
    faults: list[int | str],
    problem: str,
    asked: int,
    max_damaged: float,
) -> None:
    index = Index.load(server.url, cache=cache)
    server.faults[FIRST].extend(faults)
    with (
        batches([(index, 1.0)], max_damaged=max_damaged, prefetch=1, shuffle_shards=1) as data,
        pytest.raises(DataError) as caught,
    ):
        data.corpora[0]._ahead = None  # it would take the faults from those that are counted here
        for _ in range(100):
            next(data)
    assert caught.value.path == f"{server.url}/{FIRST}" and problem in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value) and "start again" in str(caught.value)
    least = 2 if faults == ["loop"] * 20 else asked
    assert least <= sum(file == FIRST for file, _ in server.gets) <= asked
    server.faults.clear()
    assert torch.equal(everything(index), everything(Index.load(folder)))


def test_a_server_that_drips_is_given_up(
    server: ShardServer, cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index.load(server.url, cache=cache)
    monkeypatch.setattr(fetching, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(fetching, "SLOWEST", 10**9)
    server.faults[FIRST].extend(["drip"] * 8)
    with pytest.raises(DataError, match="it comes too slowly, at attempt 1"):
        ShardReader(index, "train").read(0, 0, 10)


def test_a_server_that_is_gone_is_named(folder: Path, server: ShardServer, cache: ShardCache) -> None:
    index = Index.load(server.url, cache=cache)
    reader = ShardReader(index, "train")
    first = reader.read(0, 0, 100)
    port = server.server_address[1]
    server.shutdown()
    server.server_close()
    assert torch.equal(ShardReader(index, "train").read(0, 0, 100), first), "what is in the cache needs no server"
    with pytest.raises(DataError, match=rf"{port}/data/train-000001.tar: .*Connection refused"):
        reader.read(1, 0, 100)
    with pytest.raises(DataError, match=rf"{port}/data/index.json: .*Connection refused"):
        Index.load(index.directory.url, cache=cache)  # type: ignore[union-attr]
    with serving(folder, port):
        assert torch.equal(reader.read(1, 0, 100), ShardReader(Index.load(folder), "train").read(1, 0, 100))


@pytest.mark.parametrize(
    ("faults", "problem"),
    [
        ([404], "the server answers 404 (Not Found). Check the URL of the folder"),
        ([500] * 8, "500"),
        (["cut"] * 8, "the connection ended after"),
        (["stall"] * 8, "timed out"),
        (["loop"] * 20, "a redirect without end"),
        (["wrong"], "it is not the JSON of an index"),
    ],
)
def test_D6_an_index_that_does_not_come_is_named(
    server: ShardServer, cache: ShardCache, faults: list[int | str], problem: str
) -> None:
    server.faults["index.json"].extend(faults)
    with pytest.raises(DataError) as caught:
        Index.load(server.url, cache=cache)
    assert caught.value.path == f"{server.url}/index.json" and problem in str(caught.value)
    assert str(caught.value).isprintable() and not cache.folder.exists()


def test_D6_a_redirect_is_followed_without_what_comes_with_it(
    server: ShardServer, cache: ShardCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(urls, "STALL_SECONDS", 5.0)
    server.faults["index.json"].append("page")
    assert Index.load(server.url, cache=cache).split("train").shards
    assert server.count("index.json") == 2 and capsys.readouterr().err == "", "no attempt waited for the page"


def test_an_index_that_comes_at_last_is_right(folder: Path, server: ShardServer, cache: ShardCache) -> None:
    server.faults["index.json"].extend([500, "cut", "refuse"])
    assert Index.load(server.url, cache=cache).fingerprint == Index.load(folder).fingerprint


def test_D6_an_index_is_bounded_in_size(
    server: ShardServer, cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megasparse.data.remote.MOST_BYTES", 1000)
    for fault in ("longer", "longer unannounced"):
        server.faults["index.json"].append(fault)
        with pytest.raises(DataError, match="more than 1,000 bytes, too many for an index"):
            Index.load(server.url, cache=cache)


def test_D10_any_bytes_for_an_index_are_one_clear_error(folder: Path, server: ShardServer, cache: ShardCache) -> None:
    path = folder / "index.json"
    draw, whole = random.Random(0), path.read_bytes()
    refused = 0
    for _ in range(150):
        mutant = bytearray(whole)
        for _ in range(draw.choice([1, 3, 30])):
            mutant[draw.randrange(len(mutant))] = draw.randrange(256)
        path.write_bytes(draw.choice([bytes(mutant), draw.randbytes(draw.randrange(300)), whole[: len(mutant) // 2]]))
        try:
            Index.load(server.url, cache=cache)
        except DataError as error:
            assert str(error).isprintable() and error.path == f"{server.url}/index.json"
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("gs://bucket/data", '"gs" is not a kind of URL.*http, https, s3'),
        ("file:///etc", '"file" is not a kind of URL'),
        ("ftp://host/data", '"ftp" is not a kind of URL'),
        ("http://user:secret@host/data", r"^http://host/data: .*no user, password"),
        ("http://host/data?token=secret", r"^http://host/data: .*no user, password, query"),
        ("http://host/my data", "this is not a URL"),
        ("http://host/\u00e4", "this is not a URL"),
        ("http:///data", "this is not a URL"),
    ],
)
def test_D6_other_urls_are_refused(url: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem) as caught:
        Index.load(url)
    assert "secret" not in str(caught.value) and str(caught.value).isprintable()


def test_a_copy_that_was_damaged_is_fetched_again(folder: Path, server: ShardServer, cache: ShardCache) -> None:
    want = everything(Index.load(folder))
    assert torch.equal(everything(Index.load(server.url, cache=cache)), want)
    one, two, *_ = sorted(cache.folder.glob("*.tar"))
    content = bytearray(one.read_bytes())
    content[700] ^= 1
    one.write_bytes(content)
    os.truncate(two, 100)
    assert torch.equal(everything(Index.load(server.url, cache=ShardCache(cache.folder))), want)
    assert server.count() == SHARDS + 2


def test_D6_a_cache_that_cannot_be_written_is_named(server: ShardServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    index = Index.load(server.url, cache=ShardCache(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"file/cache: the cache of shards cannot be used: .*Set data.cache"):
        ShardReader(index, "train").read(0, 0, 10)


def test_a_full_disk_is_named_and_not_asked_again(server: ShardServer, cache: ShardCache, monkeypatch: Any) -> None:
    index = Index.load(server.url, cache=cache)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DataError, match=r"cache/.*partial: a shard cannot be written .*No space left.*Make room"):
        ShardReader(index, "train").read(0, 0, 10)
    assert server.count() == 1


def test_shards_are_fetched_before_they_are_needed(server: ShardServer, cache: ShardCache) -> None:
    data = batches([(Index.load(server.url, cache=cache), 1.0)], shuffle_shards=1, prefetch=0)
    with data:
        next(data)
        order = data.corpora[0].order
        first, second = order.shards_ahead(0)
        assert order.locate(0)[0] == first and order.locate(int(order.sequences[first]))[0] == second
        deadline = time.monotonic() + 10
        while server.count() < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert {file for file, _ in server.gets[1:]} == {f"train-{shard:06d}.tar" for shard in (first, second)}
    assert server.count() == 2, "and no more than those"


@pytest.mark.parametrize("group", [1, 2, 4, 10])
def test_the_shards_ahead_are_those_that_the_next_sequences_are_in(group: int) -> None:
    order = Order([300, 20, 210, 90, 600, 120, 270], 30, seed=5, group=group)
    last = 2 * order.sequences_per_epoch
    groups = [order.group_of(sample) for sample in range(last)]
    for sample in range(0, order.sequences_per_epoch):
        ahead = order.shards_ahead(sample)
        here = {order.locate(i)[0] for i in range(last) if groups[i] == groups[sample]}
        after = groups[groups.index(groups[sample]) + groups.count(groups[sample])]
        there = {order.locate(i)[0] for i in range(last) if groups[i] == after}
        assert set(ahead) == here | there and len(ahead) == len(set(ahead))
        assert set(ahead[: len(here)]) == here


@pytest.mark.parametrize("prefetch", [0, 1])
def test_stopping_ends_a_fetch_that_is_under_way(server: ShardServer, cache: ShardCache, prefetch: int) -> None:
    index = Index.load(server.url, cache=cache)
    for shard in index.split("train").shards:
        server.faults[shard.file].extend(["drip"] * 8)
    data = batches([(index, 1.0)], prefetch=prefetch, stop_waiting=lambda: True)
    with pytest.raises(WaitingStopped), data:
        next(data)
    assert data._thread is None, "the thread has ended"


@pytest.mark.parametrize("prefetch", [0, 1])
def test_waiting_for_a_slow_server_is_reported_by_the_thread_that_waits(
    server: ShardServer, cache: ShardCache, prefetch: int
) -> None:
    index = Index.load(server.url, cache=cache)
    server.pause, server.piece = 0.05, 500
    reported: list[tuple[str, bool]] = []

    def alive(doing: str) -> None:
        reported.append((doing, threading.current_thread() is threading.main_thread()))

    with batches([(index, 1.0)], prefetch=prefetch, alive=alive, shuffle_shards=1) as data:
        next(data)
    assert len(reported) >= 3 and all(mine and server.url in doing for doing, mine in reported), reported


def test_a_shard_that_is_larger_than_the_limit_is_an_error(server: ShardServer, tmp_path: Path) -> None:
    index = Index.load(server.url, cache=ShardCache(tmp_path / "cache", 5000))
    with pytest.raises(ConfigError, match=r"^data.cache_gb: .*train-000000.tar alone has .* bytes.*Raise it"):
        ShardReader(index, "train").read(0, 0, 10)
    assert server.count() == 0


def test_the_limit_holds_and_what_was_not_used_for_longest_goes_first(
    folder: Path, server: ShardServer, tmp_path: Path
) -> None:
    size = (folder / FIRST).stat().st_size
    assert len({path.stat().st_size for path in folder.glob("*.tar")}) <= 2
    largest = max(path.stat().st_size for path in folder.glob("*.tar"))
    cache = ShardCache(tmp_path / "cache", 3 * largest + size // 2)
    index = Index.load(server.url, cache=cache)
    shards = index.split("train").shards
    reader = ShardReader(index, "train", open_files=1)

    def kept() -> set[int]:
        return {number for number, shard in enumerate(shards) if cache.path(shard).exists()}

    for shard in (0, 1, 2, 0):
        reader.read(shard, 0, 10)
    assert kept() == {0, 1, 2}
    reader.read(3, 0, 10)
    assert kept() == {0, 2, 3}, "1 was not used for longest"
    reader.read(4, 0, 10)
    assert kept() == {0, 3, 4}
    holding = ShardReader(index, "train", open_files=3)
    for shard in (4, 0, 3):
        holding.read(shard, 0, 10)
    reader.close()
    with pytest.raises(ConfigError, match=r"data.cache_gb: .* bytes of it are in use. Raise it, or lower data.shuffle"):
        reader.read(5, 0, 10)
    assert kept() == {0, 3, 4} and torch.equal(holding.read(4, 0, 10), ShardReader(index, "train").read(4, 0, 10))
    holding.close()
    everything_read = [reader.read(number, 0, shard.tokens) for number, shard in enumerate(shards)]
    local = ShardReader(Index.load(folder), "train")
    assert all(torch.equal(tokens, local.read(k, 0, len(tokens))) for k, tokens in enumerate(everything_read))
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= cache.limit


def test_an_epoch_under_a_small_limit_is_the_same(folder: Path, server: ShardServer, tmp_path: Path) -> None:
    largest = max(path.stat().st_size for path in folder.glob("*.tar"))
    cache = ShardCache(tmp_path / "cache", 2 * largest)
    local, remote = (batches([(index, 1.0)]) for index in (Index.load(folder), Index.load(server.url, cache=cache)))
    with local, remote:
        for _ in range(100):
            mine, theirs = (torch.cat([b.tokens for b in next(data).micro_batches]) for data in (remote, local))
            assert np.array_equal(mine, theirs)
            assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= cache.limit


def test_what_is_fetched_ahead_costs_none_of_what_is_needed_before(
    folder: Path, server: ShardServer, tmp_path: Path
) -> None:
    largest = max(path.stat().st_size for path in folder.glob("*.tar"))
    cache = ShardCache(tmp_path / "cache", 2 * largest)
    index = Index.load(server.url, cache=cache)
    first, second, third, *_ = index.split("train").shards
    assert index.remote is not None
    for shard in (first, second):
        assert index.remote.fetch_ahead(shard, [first, second, third], print)
    assert not index.remote.fetch_ahead(third, [first, second, third], print)
    assert cache.path(first).exists() and cache.path(second).exists() and server.count() == 2
    assert index.remote.fetch_ahead(third, [second, third], print)
    assert not cache.path(first).exists() and cache.path(second).exists()


def test_what_another_process_deletes_while_room_is_made_is_no_error(
    server: ShardServer, cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, scan = Index.load(server.url, cache=cache), os.scandir
    cache.folder.mkdir()
    (given_up := cache.folder / f"{'0' * 64}.9000.partial").touch()

    @contextmanager
    def late(folder: Path) -> Iterator[list[os.DirEntry[str]]]:
        with scan(folder) as files:
            found = list(files)
        given_up.unlink(missing_ok=True)
        yield found

    monkeypatch.setattr(os, "scandir", late)
    reader = ShardReader(index, "train")
    assert len(reader.read(0, 0, 10)) == 10 and not given_up.exists()
    reader.close()


def test_a_shard_gets_its_name_while_nobody_makes_room(
    server: ShardServer, cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks for it, or counts, between its two names would fetch it once more, or take its bytes for free."""
    index, rename, locked = Index.load(server.url, cache=cache), os.rename, []

    def monitored(source: Path, target: Path) -> None:
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


@pytest.mark.parametrize("fault", ["longer", "longer unannounced"])
def test_D6_no_byte_more_is_taken_than_the_index_says(
    server: ShardServer, cache: ShardCache, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    index, write, ends = Index.load(server.url, cache=cache), os.pwrite, []

    def noting(descriptor: int, piece: bytes, offset: int) -> int:
        ends.append(offset + len(piece))
        return write(descriptor, piece, offset)

    monkeypatch.setattr(os, "pwrite", noting)
    server.faults[FIRST].append(fault)
    ShardReader(index, "train").read(0, 0, 10)
    assert max(ends) == index.split("train").shards[0].bytes
