import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megasparse.data.index import Index
from megasparse.data.tokenizer import ByteTokenizer
from megasparse.errors import ConfigError, DataError

Make = Callable[..., Index]


def edit(index: Index, change: Callable[[dict[str, Any]], None]) -> Path:
    path = index.directory / "index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def test_counts_are_those_of_the_text(make_index: Make, corpus: bytes) -> None:
    index = make_index(corpus, split="80,10,10")
    assert [index.split(name).tokens for name in ("train", "validation", "test")] == [5610, 701, 702]
    train = index.split("train")
    assert [shard.tokens for shard in train.shards] == [1000] * 5 + [610]
    assert [shard.samples for shard in train.shards] == [10] * 5 + [7]
    assert train.samples == 57
    index.verify()


def test_no_data_says_how_to_prepare_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"python tools/prepare_data.py enwik8 --source https\S+ --output \S*/enwik8$"):
        Index.load(tmp_path / "enwik8")
    with pytest.raises(DataError, match=r"python tools/prepare_data.py text --source \S+ --output '.*my book'$"):
        Index.load(tmp_path / "my book")


def test_an_unknown_split_names_the_known_ones(make_index: Make, corpus: bytes) -> None:
    with pytest.raises(DataError, match=r'index\.json: there is no split "trian" .*Did you mean "train"'):
        make_index(corpus).split("trian")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.update(format=2), "format"),
        (lambda c: c.update(extra=1), "extra"),
        (lambda c: c.pop("tokenizer"), "tokenizer"),
        (lambda c: c.update(splits={}), "splits"),
        (lambda c: c["splits"]["train"].update(tokens="7013"), "splits.train.tokens"),
        (lambda c: c["splits"]["train"].update(tokens=7012), r"splits.train.tokens is 7012, but its shards have 7013"),
        (lambda c: c["splits"]["train"]["shards"][0].update(file="../train-000000.tar"), r"shards\.0\.file"),
        (lambda c: c["splits"]["train"]["shards"][0].update(file="/etc/passwd"), r"shards\.0\.file"),
        (lambda c: c["splits"]["train"]["shards"][0].update(sha256="0"), r"shards\.0\.sha256"),
        (lambda c: c["splits"]["train"]["shards"][0].update(tokens=0), r"shards\.0\.tokens"),
        (lambda c: c["splits"].update(test=c["splits"]["train"]), r"train-000000\.tar is listed more than once"),
    ],
)
def test_a_wrong_entry_is_named(
    make_index: Make, corpus: bytes, change: Callable[[dict[str, Any]], None], named: str
) -> None:
    path = edit(make_index(corpus), change)
    with pytest.raises(DataError, match=named) as caught:
        Index.load(path.parent)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_an_index_that_is_no_index(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(DataError, match=r"index\.json"):
        Index.load(tmp_path)


def test_fingerprint_is_of_the_tokens_alone(make_index: Make, corpus: bytes) -> None:
    index = make_index(corpus)
    before = index.fingerprint
    edit(index, lambda c: c.update(command="another"))
    assert Index.load(index.directory).fingerprint == before
    edit(index, lambda c: c["splits"]["train"]["shards"].reverse())
    assert Index.load(index.directory).fingerprint != before
    edit(index, lambda c: c["splits"]["train"]["shards"].reverse())
    edit(index, lambda c: c["tokenizer"].update(sha256="0" * 64))
    assert Index.load(index.directory).fingerprint != before


def test_another_tokenizer_is_refused_naming_both(make_index: Make, corpus: bytes) -> None:
    index = make_index(corpus)
    index.require_tokenizer(ByteTokenizer())
    edit(index, lambda c: c["tokenizer"].update(name="words"))
    with pytest.raises(ConfigError, match=r'data\.tokenizer: "bytes".*"words"'):
        Index.load(index.directory).require_tokenizer(ByteTokenizer())
