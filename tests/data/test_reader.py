"""Tokens of 1, 2 and 4 bytes, and index.json, against readings with tarfile and numpy; and damage, always an error."""

import hashlib
import json
import os
import random
from collections.abc import Callable

import numpy as np
import pytest

from megasparse.data.index import Index
from megasparse.data.index_file import IndexFile, parse_content
from megasparse.data.reader import EvaluationStream, ShardReader
from megasparse.data.tokenizers.simple import ByteTokenizer
from megasparse.errors import ConfigError, DataError
from tests.data.folders import do, edit, everything, flip, read_folder, without_crc32, write_folder
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.peak_memory import traced_peak

SIZES = (1000, 1000, 730)
THIRD = "train-000003.tar"


def tokens_of(width: int) -> list[np.ndarray]:
    """Three shards, the smallest and largest numbers of the width among them."""
    draw = np.random.Generator(np.random.PCG64(width))
    shards = [draw.integers(0, 256**width, size, dtype=np.int64) for size in SIZES]
    shards[0][:3] = shards[2][-3:] = [0, 256**width - 1, 256**width // 2]
    return shards


@pytest.fixture(params=[1, 2, 4])
def folder(request, tmp_path):
    return write_folder(tmp_path / "data", tokens_of(request.param), width=request.param)


def test_any_range_equals_numpy(folder):
    index, shards = Index.load(folder), read_folder(folder)
    reader = ShardReader(index, "train")
    draw = random.Random(0)
    for _ in range(200):
        number = draw.randrange(3)
        start, stop = sorted(draw.sample(range(SIZES[number] + 1), 2))
        assert reader.read(number, start, stop).tolist() == shards[number][start:stop].tolist()
    reader.close()
    stream = EvaluationStream(index, "train")
    whole = np.concatenate(shards)
    assert stream.tokens == sum(SIZES)
    for start, stop in [(0, 2730), (999, 1001), (990, 2010), (2729, 2730), (5, 5)]:
        assert stream.read(start, stop).tolist() == whole[start:stop].tolist()
    stream.close()


def test_a_fingerprint_of_one_byte_is_unchanged_and_a_wider_one_contains_the_width(tmp_path):
    """The formula of the first release, written out."""
    fingerprints = {}
    for width in (1, 2):
        folder = write_folder(tmp_path / str(width), tokens_of(width), width=width)
        raw = json.loads((folder / "index.json").read_text())
        splits = {n: [[s["sha256"], s["tokens"], s["samples"]] for s in p["shards"]] for n, p in raw["splits"].items()}
        identity = {"format": 1, "tokenizer": raw["tokenizer"], "splits": splits}
        earlier = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        fingerprints[width] = (Index.load(folder).fingerprint, earlier)
    assert fingerprints[1][0] == fingerprints[1][1]
    assert fingerprints[2][0] != fingerprints[2][1]


@together(
    ("shard", "settings", "problem"),
    [
        *(({"width": width}, {}, r"splits\.train\.shards\.0\.width") for width in (0, 3, 8, -1, "2", 2.5, None)),
        *(({"width": width}, {}, "which are not samples of settings.sample_bytes = 200") for width in (1, 4)),
        ({}, {"record": 100}, r"train-000002\.tar has 730 tokens, which is not a whole number of records of 100"),
        *(({}, {"record": record}, r"settings\.record is ") for record in (0, "10", True, 10.0, {"a": "\n"})),
        *(({}, {"sample_bytes": size}, r"settings\.sample_bytes is ") for size in (None, "100", True, -1, 1.5)),
        *(({}, {"sample_bytes": size}, "not samples of settings.sample_bytes") for size in (99, 112, 10**30)),
        ({"bytes": 9 * 1024}, {}, "has 9216 bytes, too few for its 10 samples"),
        ({"file": "train-000000.bin", "start": 0}, {}, r"shards\.0\.file: String should match pattern"),
        ({"start": 512}, {}, r"shards\.0\.start"),
        *(({"crc32": crc32}, {}, "crc32") for crc32 in ("0" * 79, "0" * 88, "g" * 80, "")),
    ],
)
def test_an_index_that_contradicts_itself_is_rejected(tmp_path, shard, settings, problem):
    index = Index.load(write_folder(tmp_path / "data", tokens_of(2), width=2))
    edit(index, lambda content: content["settings"].update(settings))
    edit(index, lambda content: content["splits"]["train"]["shards"][0].update(shard))
    refusal(lambda: Index.load(index.directory), match=problem)


Harm = Callable[[bytes], bytes]
CONTENT: dict[str, tuple[Harm, str]] = {
    "a bit of the text": (flip(5 * 1024 + 520), "; the first damaged sample is number 5, at byte 5120"),
    "samples swapped": (lambda tar: tar[1024:2048] + tar[:1024] + tar[2048:], "sample is number 0, at byte 0"),
    "garbage": (lambda tar: random.Random(0).randbytes(len(tar)), "sample is number 0, at byte 0"),
    "a bit of a header": (flip(5 * 1024 + 3), ""),
    "a bit of the padding": (flip(5 * 1024 + 700), ""),
}
SIZE: dict[str, Harm] = {
    "cut": lambda tar: tar[: 5 * 1024 + 100],
    "empty": lambda tar: b"",
    "sample missing": lambda tar: tar[:1024] + tar[2048:],
    "sample twice": lambda tar: tar[:1024] + tar,
}


@pytest.mark.parametrize("harm", [*CONTENT, *SIZE])
def test_damage_is_one_error_that_names_the_shard(index, harm, figures):
    """Also when the file is damaged after its first read."""
    reader = ShardReader(index, "train")
    reader.read(3, 0, 10)
    path = do(CONTENT[harm][0] if harm in CONTENT else SIZE[harm], index.directory / THIRD)
    stated = "this shard is damaged: its sha256 is" if harm in CONTENT else "index.json says"
    checks = [lambda: reader.read(3, 0, 10), lambda: EvaluationStream(index, "train").read(3000, 3010)]
    for check in [*checks, lambda: Index.load(index.directory)][: 2 + (harm in SIZE)]:
        with pytest.raises(DataError) as caught:
            check()
        assert caught.value.path == str(path) and stated in str(caught.value) and "\n" not in str(caught.value)
        assert CONTENT.get(harm, (None, ""))[1] in str(caught.value)
    figures(damages_done=1, damages_detected=1)


@pytest.mark.parametrize("kind", ["missing", "fifo", "folder"])
def test_missing_and_irregular_files_are_rejected_without_waiting(index, kind):
    path, problem = index.directory / THIRD, "No such file" if kind == "missing" else "this is not a regular file"
    path.unlink()
    if kind != "missing":
        os.mkfifo(path) if kind == "fifo" else path.mkdir()
    refusal(lambda: Index.load(index.directory), match=r"train-000003\.tar: this shard")
    with pytest.raises(DataError, match=rf"train-000003\.tar: this shard cannot be read: {problem}"):
        ShardReader(index, "train").read(3, 0, 10)


def test_a_read_that_fails_or_is_cut_off(index, monkeypatch):
    reader = ShardReader(index, "train")
    reader.read(3, 0, 10)
    monkeypatch.setattr(os, "preadv", lambda *arguments: 5)  # of 10 bytes
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard is damaged: sample 2 is cut off at byte 2615"):
        reader.read(3, 250, 260)

    def fail(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    refusal(lambda: reader.read(3, 250, 260), match=r"train-000003\.tar: this shard cannot be read: Input/output error")


def test_a_shard_is_hashed_once_in_a_process(index, monkeypatch):
    hashed = []
    monkeypatch.setattr("megasparse.data.shard_file.verify_shard", lambda path, shard, *file: hashed.append(shard.file))
    for _ in range(3):
        reader = ShardReader(index, "train", open_files=1)
        for shard in (0, 1, 0, 1):
            reader.read(shard, 0, 10)
    assert hashed == ["train-000000.tar", "train-000001.tar"]


def test_files_are_closed(index):
    before = len(os.listdir("/proc/self/fd"))
    reader = ShardReader(index, "train", open_files=3)
    for shard in range(8):
        reader.read(shard, 0, 1)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    os.truncate(reader.index.directory / THIRD, 5 * 1024)
    refusal(lambda: reader.read(3, 0, 1))
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_missing_data_names_the_command_that_prepares_it(tmp_path):
    other = "; or give pretrain your texts: --data my_books/$"
    with pytest.raises(
        DataError, match=r"megasparse prepare-data enwik8 --source https\S+ --output \S*/enwik8" + other
    ):
        Index.load(tmp_path / "enwik8")
    with pytest.raises(DataError, match=r"megasparse prepare-data text --source \S+ .*--output '.*my book'" + other):
        Index.load(tmp_path / "my book")


def test_an_unknown_split_names_the_known_ones(index):
    refusal(lambda: index.split("trian"), match=r'index\.json: there is no split "trian" .*Did you mean "train"')


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
        (lambda c: c["splits"].update(test=c["splits"]["train"]), r"train-000000\.tar is listed more than once"),
    ],
)
def test_a_wrong_entry_is_named(index, change, named):
    path = edit(index, change)
    with pytest.raises(DataError, match=named) as caught:
        Index.load(path.parent)
    assert caught.value.path == str(path)


def test_the_fingerprint_depends_only_on_the_tokens(index):
    before = index.fingerprint
    edit(index, lambda c: c.update(command="another"))
    assert Index.load(index.directory).fingerprint == before
    edit(index, lambda c: c["splits"]["train"]["shards"].reverse())
    assert Index.load(index.directory).fingerprint != before
    edit(index, lambda c: c["splits"]["train"]["shards"].reverse())
    edit(index, lambda c: c["tokenizer"].update(sha256="0" * 64))
    assert Index.load(index.directory).fingerprint != before


def test_another_tokenizer_is_rejected_naming_both(index):
    index.require_tokenizer(ByteTokenizer())
    edit(index, lambda c: c["tokenizer"].update(name="words"))
    with pytest.raises(ConfigError, match=r'data\.tokenizer: "bytes".*"words"'):
        Index.load(index.directory).require_tokenizer(ByteTokenizer())


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
    values = {"command": 'x,{"\\' * (1 << 18), "source": {"location": ["https://user:SECRET@host/x?Signature=SECRET"]}}
    file = parse_content(changed('"command": "", "source": {}', json.dumps(values)[1:-1]), "index.json", IndexFile)
    assert len(file.command) == 5 << 18 and file.source == {"location": ["https://host/x"]}


@together(
    ("content", "problem"),
    {
        "depth bomb of lists": (b"[" * 500_000, "nested too deeply"),
        "depth bomb in an open entry": (
            changed('{"sample_bytes": 5}, "splits"', '{"a":' * 5000 + "1" + "}" * 5000 + ', "splits"'),
            "deeply",
        ),
        "NaN": (changed('"tokens": 5', '"tokens": NaN'), "NaN is not JSON"),
        "1e999": (changed('"tokens": 5', '"tokens": 1e999'), "tokens"),
        "2**80": (changed('"bytes": 1029', f'"bytes": {2**80}'), "bytes"),
        "digits": (changed('"bytes": 1029', f'"bytes": 1{"0" * 5000}'), "JSON"),
        "duplicate keys": (changed('"tokens": 5', '"tokens": 4, "tokens": 5'), '"tokens" is given twice'),
        "100 MB of text": (changed('"command": ""', f'"command": "{"x" * 10**8}"'), "command"),
        "100 MB of a key": (f'{{"{"x" * 10**8}": 1}}'.encode(), "Field required"),
        "wrong types": (changed('"tokens": 5', '"tokens": "5"'), "tokens"),
        "BOM": (b"\xef\xbb\xbf" + VALID.encode(), "BOM"),
        "UTF-16": (VALID.encode("utf-16"), "utf-8"),
        "not UTF-8": (VALID.replace("text", "t\xe4xt").encode("latin-1"), "utf-8"),
        "a lone surrogate": (changed("text", "\\ud800"), "corpus"),
        "a file name of two lines": (changed("a.tar", "a\\nb.tar"), "file"),
        "a list": (b"[]", "the file"),
        "nothing": (b"", "JSON"),
        "two values": (VALID.encode() * 2, "JSON"),
    }.values(),
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


@together("kind", ["huge", "fifo", "folder", "device"])
def test_huge_or_irregular_index_files_are_not_read(tmp_path, kind):
    path = tmp_path / "index.json"
    if kind == "huge":
        path.touch()
        os.truncate(path, (1 << 29) + 1)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    problem = r"index\.json: cannot be read: (536,870,913 bytes are more|this is not a regular file)"

    def load():
        refusal(lambda: Index.load(tmp_path), match=problem)

    assert traced_peak(load) < 5e6


def test_a_pipe_is_rejected_as_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal(lambda: Index.load("pipe:touch marker"), match="there is no data here")
    assert os.listdir(tmp_path) == []
