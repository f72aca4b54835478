import os
import random
import zlib

import pytest

from megasparse.data.index import Index
from megasparse.data.index_file import IndexFile, parse_content
from megasparse.data.tokenizers.simple import ByteTokenizer
from megasparse.errors import ConfigError, DataError
from tests.data.folders import edit, everything, without_crc32
from tests.helpers.traced import traced_peak


def test_counts_are_those_of_the_text(make_index, corpus):
    index = make_index(corpus, split="80,10,10")
    assert [index.split(name).tokens for name in ("train", "validation", "test")] == [5610, 701, 702]
    train = index.split("train")
    assert [shard.tokens for shard in train.shards] == [1000] * 5 + [610]
    assert [shard.samples for shard in train.shards] == [10] * 5 + [7]
    assert train.samples == 57


def test_no_data_says_how_to_prepare_it(tmp_path):
    with pytest.raises(DataError, match=r"megasparse prepare-data enwik8 --source https\S+ --output \S*/enwik8$"):
        Index.load(tmp_path / "enwik8")
    with pytest.raises(DataError, match=r"megasparse prepare-data text --source \S+ .*--output '.*my book'$"):
        Index.load(tmp_path / "my book")


def test_an_unknown_split_names_the_known_ones(index):
    with pytest.raises(DataError, match=r'index\.json: there is no split "trian" .*Did you mean "train"'):
        index.split("trian")


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
        (lambda c: c["tokenizer"].update(name="two\nlines"), r"tokenizer\.name"),
        (lambda c: c["tokenizer"].update(sha256="\n" * 64), r"tokenizer\.sha256"),
        (lambda c: c["splits"]["train"].update(raw_bytes=0), r"splits\.train\.raw_bytes"),
        (lambda c: c["splits"]["train"].update(words=-1), r"splits\.train\.words"),
        (lambda c: c["splits"]["train"].update(words="7"), r"splits\.train\.words"),
        (lambda c: c["splits"].update(test=c["splits"]["train"]), r"train-000000\.tar is listed more than once"),
    ],
)
def test_a_wrong_entry_is_named(index, change, named):
    path = edit(index, change)
    with pytest.raises(DataError, match=named) as caught:
        Index.load(path.parent)
    assert caught.value.path == str(path)


def test_fingerprint_is_of_the_tokens_alone(index):
    before = index.fingerprint
    edit(index, lambda c: c.update(command="another"))
    assert Index.load(index.directory).fingerprint == before
    edit(index, lambda c: c["splits"]["train"]["shards"].reverse())
    assert Index.load(index.directory).fingerprint != before
    edit(index, lambda c: c["splits"]["train"]["shards"].reverse())
    edit(index, lambda c: c["tokenizer"].update(sha256="0" * 64))
    assert Index.load(index.directory).fingerprint != before


def test_another_tokenizer_is_refused_naming_both(index):
    index.require_tokenizer(ByteTokenizer())
    edit(index, lambda c: c["tokenizer"].update(name="words"))
    with pytest.raises(ConfigError, match=r'data\.tokenizer: "bytes".*"words"'):
        Index.load(index.directory).require_tokenizer(ByteTokenizer())


def test_crc32_is_of_each_sample(index, corpus):
    shard = index.split("train").shards[3]
    assert shard.crc32 is not None
    assert [shard.crc32[i * 8 : i * 8 + 8] for i in range(10)] == [
        f"{zlib.crc32(corpus[start : start + 100]):08x}" for start in range(3000, 4000, 100)
    ]


def test_an_index_of_an_earlier_version_has_no_crc32(make_index, corpus):
    index = make_index(corpus)
    earlier = without_crc32(index)
    assert earlier.fingerprint == index.fingerprint
    assert bytes(everything(earlier).tolist()) == corpus
    assert make_index(corpus).split("train").shards[0].crc32 is None  # all is done: nothing is written again


VALID = (
    '{"tokenizer": {"name": "bytes", "sha256": "SHA256"}, "corpus": "text", "command": "", "source": {}, '
    '"settings": {"sample_bytes": 5}, "splits": {"train": {"tokens": 5, "samples": 1, "shards": '
    '[{"file": "a.tar", "samples": 1, "tokens": 5, "bytes": 1029, "sha256": "SHA256"}]}}}'
).replace("SHA256", "0" * 64)


def changed(old: str, new: str) -> bytes:
    assert old in VALID
    return VALID.replace(old, new).encode()


def test_the_valid_index_that_the_next_test_corrupts():
    assert parse_content(VALID.encode(), "index.json", IndexFile).splits["train"].tokens == 5


@pytest.mark.parametrize(
    ("content", "problem"),
    {
        "depth bomb of lists": (b"[" * 5_000_000, "nested too deeply"),
        "depth bomb of objects": (b'{"a":' * 1_000_000, "nested too deeply"),
        "depth bomb in an open entry": (
            changed('{"sample_bytes": 5}, "splits"', '{"a":' * 5000 + "1" + "}" * 5000 + ', "splits"'),
            "deeply",
        ),
        "NaN": (changed('"tokens": 5', '"tokens": NaN'), "NaN is not JSON"),
        "NaN in an open entry": (changed('"settings": {', '"settings": {"a": NaN, '), "NaN is not"),
        "Infinity": (changed('"source": {}', '"source": {"a": [-Infinity]}'), "-Infinity is not"),
        "1e999": (changed('"tokens": 5', '"tokens": 1e999'), "tokens"),
        "2**80": (changed('"bytes": 1029', f'"bytes": {2**80}'), "bytes"),
        "digits": (changed('"bytes": 1029', f'"bytes": 1{"0" * 5000}'), "JSON"),
        "duplicate keys": (changed('"tokens": 5', '"tokens": 4, "tokens": 5'), '"tokens" is given twice'),
        "duplicate splits": (changed('"splits": {', '"splits": {"train": 1, '), '"train" is given twice'),
        "100 MB of text": (changed('"command": ""', f'"command": "{"x" * 10**8}"'), "100,000,000 char"),
        "100 MB of a key": (f'{{"{"x" * 10**8}": 1}}'.encode(), "100,000,000 char"),
        "wrong types": (changed('"tokens": 5', '"tokens": "5"'), "tokens"),
        "a float": (changed('"tokens": 5', '"tokens": 5.0'), "tokens"),
        "null": (changed('"tokens": 5', '"tokens": null'), "tokens"),
        "BOM": (b"\xef\xbb\xbf" + VALID.encode(), "BOM"),
        "UTF-16": (VALID.encode("utf-16"), "utf-8"),
        "not UTF-8": (VALID.replace("text", "t\xe4xt").encode("latin-1"), "utf-8"),
        "a lone surrogate": (changed("text", "\\ud800"), "JSON|surrogate"),
        "a file name of two lines": (changed("a.tar", "a\\nb.tar"), "file"),
        "a key of two lines": (changed('"corpus"', '"a\\nb": 1, "corpus"'), "a.*b"),
        "a list": (b"[]", "the file"),
        "nothing": (b"", "JSON"),
        "an open brace": (b"{", "JSON"),
        "two bytes": (b"\xff\xfe", "utf-8"),
        "two values": (VALID.encode() * 2, "JSON"),
    }.values(),
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_a_hostile_index_is_one_line_in_bounded_memory(tmp_path, content, problem):
    path = tmp_path / "index.json"
    path.write_bytes(content)
    size = len(content)
    del content

    def load():
        with pytest.raises(DataError, match=problem) as caught:
            Index.load(tmp_path)
        assert caught.value.path == str(path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000

    assert traced_peak(load) < 5e6 + 6 * size


@pytest.mark.parametrize("kind", ["huge", "fifo", "folder", "device"])
def test_what_cannot_be_an_index_is_not_even_read(tmp_path, kind):
    path = tmp_path / "index.json"
    if kind == "huge":
        path.touch()
        os.truncate(path, (1 << 30) + 1)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    problem = r"index\.json: (1,073,741,825 bytes are too many|this is not a regular file|cannot be read: Is a dir)"

    def load():
        with pytest.raises(DataError, match=problem):
            Index.load(tmp_path)

    assert traced_peak(load) < 5e6


def test_no_mutation_of_an_index_crashes(make_index, corpus):
    path = make_index(corpus, shard_bytes=3000).directory / "index.json"
    valid = path.read_bytes()
    draw = random.Random(0)
    refused = 0
    for _ in range(300):
        mutant = bytearray(valid)
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(mutant))
            values = [b"", bytes([draw.randrange(256)]), b'"', b"[", b"{}", b"null", b"-1", b"1e9", b"NaN", b"\xff"]
            mutant[place : place + draw.choice([0, 1, 1, 30])] = draw.choice([*values, b"\\u0000"])
        path.write_bytes(mutant)
        try:
            Index.load(path.parent)
        except DataError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 150


def test_a_pipe_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="there is no data here"):
        Index.load("pipe:touch marker")
    assert os.listdir(tmp_path) == []
