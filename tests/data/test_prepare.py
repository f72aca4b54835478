import fcntl
import os
import stat

import pytest
import webdataset

from megasparse.data import prepare as prepare_module
from megasparse.data.index import Index
from megasparse.errors import DataError
from tests.data.folders import crashing, everything, files, prepared, source_of


def test_plain_webdataset_reads_the_shards(make_index, corpus):
    index = make_index(corpus, split="80,10,10")
    for split, text in (("train", corpus[:5610]), ("validation", corpus[5610:6311]), ("test", corpus[6311:])):
        urls = [str(index.path(shard)) for shard in index.split(split).shards]
        samples = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False))
        assert b"".join(sample["bin"] for sample in samples) == text
        assert [sample["__key__"] for sample in samples] == [f"{i:09d}" for i in range(index.split(split).samples)]


@pytest.mark.parametrize("sample_bytes", [1, 7, 999, 10_000])
def test_any_sample_size_gives_the_text(make_index, corpus, sample_bytes):
    index = make_index(corpus, sample_bytes=sample_bytes)
    assert bytes(everything(index).tolist()) == corpus
    assert all(shard.tokens <= max(1000, sample_bytes) for shard in index.split("train").shards)


def test_shards_depend_on_the_text_alone(make_index, corpus, monkeypatch):
    index = make_index(corpus)
    before = files(index.directory)
    for path in index.directory.iterdir():
        path.unlink()
    monkeypatch.setenv("USER", "another")
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert files(make_index(corpus).directory) == before


def test_no_file_is_writable_by_others(index):
    folder = index.directory
    assert not any(path.stat().st_mode & stat.S_IWOTH for path in [folder, *folder.iterdir()])


@pytest.mark.parametrize("crash_at", range(1, 26))
def test_after_a_crash_at_any_replace_the_next_run_completes(make_index, corpus, tmp_path, monkeypatch, crash_at):
    def make() -> Index:
        return make_index(corpus, split="60,20,20", shard_bytes=700)

    want = files(make().directory)
    (tmp_path / "data").rename(tmp_path / "whole")
    with crashing(os, "replace", crash_at):
        make()
    left = files(tmp_path / "data")
    assert "index.json" not in left
    assert {name: data for name, data in left.items() if name != ".progress.json"}.items() <= want.items()

    written, write = [], prepare_module._write_shard
    noting = lambda path, *rest: written.append(path.name) or write(path, *rest)  # noqa: E731
    monkeypatch.setattr(prepare_module, "_write_shard", noting)
    assert files(make().directory) == want
    known_to_be_whole = max(0, crash_at - 2) // 2  # replaces: progress, then (shard, progress) for each shard, index
    assert len(written) == len(want) - 1 - known_to_be_whole


def test_damaged_and_missing_shards_are_written_again(make_index, corpus):
    folder = make_index(corpus).directory
    want = files(folder)
    (folder / "train-000001.tar").unlink()
    (folder / "train-000003.tar").write_bytes(b"damaged")
    assert files(make_index(corpus).directory) == want


def test_done_is_done(make_index, corpus, monkeypatch):
    make_index(corpus)
    monkeypatch.setattr(os, "replace", None)  # nothing may be written
    make_index(corpus)


def test_another_source_or_setting_is_refused(make_index, corpus):
    folder = make_index(corpus).directory
    want = files(folder)
    source = r"prepared with another source sha256 \w+ \(now \w+\)\. Choose another --output"
    with pytest.raises(DataError, match=source):
        make_index(corpus[::-1])
    with pytest.raises(DataError, match=r"another sample_bytes 100 \(now 50\)"):
        make_index(corpus, sample_bytes=50)
    with pytest.raises(DataError, match=r"another split 100,0,0 \(now 90,5,5\)"):
        make_index(corpus, split="90,5,5")
    assert files(folder) == want
    (folder / "index.json").unlink()
    with pytest.raises(DataError, match=r"\.tar is here, but no index\.json says what it holds"):
        make_index(corpus)


def test_two_at_a_time_are_refused(make_index, corpus):
    folder = make_index(corpus).directory
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another preparation is writing here"):
            make_index(corpus)


def test_a_full_disk_is_an_error_that_says_what_to_do(make_index, corpus, tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        problem = r"data: cannot be written: No space left on device\. .*run the command again"
        with pytest.raises(DataError, match=problem):
            make_index(corpus)
        assert files(tmp_path / "data") == {}
    make_index(corpus)


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path, corpus):
    path = tmp_path / "source.txt"
    path.write_bytes(corpus)
    source = source_of(path, kind="stream")
    for changed in (corpus[::-1], corpus[:-1], corpus + b"x"):
        path.write_bytes(changed)
        with pytest.raises(DataError, match="it changed while it was read"):
            prepared("text", source, tmp_path / "data", 100, 1000, split="90,5,5")
        assert not (tmp_path / "data" / "index.json").exists()
