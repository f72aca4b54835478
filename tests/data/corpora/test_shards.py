import json
import shlex
import tarfile
from pathlib import Path

import numpy as np
import pytest

from megasparse.cli import prepare_data as prepare_data_cli
from megasparse.cli.main import door, parser_of
from megasparse.data.corpora import shards
from megasparse.data.index import Index
from megasparse.errors import ConfigError, DataError
from tests.data.corpora.pictures import special_member, write_tar
from tests.data.folders import everything, write_folder
from tests.helpers.commands import refused

prepare_data = door("prepare-data")


def index(folder: Path, *options: str) -> Index:
    """Index the shards of a folder, its errors raised."""
    given = parser_of("prepare-data", prepare_data_cli).parse_args(["shards", "--source", str(folder), *options])
    shards.write(given, "the command")
    return Index.load(folder)


def shard(*samples: bytes) -> dict[str, bytes]:
    return {f"{i:03d}.bin": sample for i, sample in enumerate(samples)}


def words(folder: Path, count: int) -> str:
    """A tokenizer of so many words."""
    (folder / "words.txt").write_text("".join(f"w{i}\n" for i in range(count - 2)) + "<unk>\n<eos>\n")
    return str(folder / "words.txt")


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_lost_index_is_written_again(tmp_path, width):
    drawn = np.random.default_rng(0)
    tokens = [drawn.integers(0, 250 if width == 1 else 1000, size) for size in (950, 400)]
    folder = write_folder(tmp_path / "data", tokens, width=width)
    lost = json.loads((folder / "index.json").read_text())
    (folder / "index.json").unlink()
    options = [] if width == 1 else ["--tokenizer", words(tmp_path, 1000), "--width", str(width)]
    found = index(folder, *options)
    entries = [entry.model_dump(exclude_defaults=True) for entry in found.split("train").shards]
    assert entries == lost["splits"]["train"]["shards"]
    assert found.sample_bytes == 100 * width and found.record is None and found.file.command == "the command"
    assert found.split("train").raw_bytes == (1350 if width == 1 else None)
    assert everything(found).tolist() == np.concatenate(tokens).tolist()


def test_shards_made_elsewhere(tmp_path):
    """Names give the splits; samples of one's own sizes; the last shard by number is the last of its split."""
    write_tar(tmp_path / "train-10.tar", shard(b"ef"))
    write_tar(tmp_path / "train-9.tar", shard(b"abc", b"d"))
    write_tar(tmp_path / "test-a_b.tar", shard(b"x", b"yz"))
    (tmp_path / "notes.txt").write_text("kept")
    found = index(tmp_path)
    assert {name: split.tokens for name, split in found.file.splits.items()} == {"train": 6, "test": 3}
    assert found.sample_bytes is None  # they differ
    for name, text in (("train", b"abcdef"), ("test", b"xyz")):
        assert bytes(everything(found, name).tolist()) == text


def test_a_size_of_samples_is_stated_only_where_all_have_it(tmp_path):
    """Damage is looked for by it."""
    for name, samples, size in (("a", (b"x", b"yz"), None), ("b", (b"xy", b"z", b"xy"), None), ("c", (b"xy", b"z"), 2)):
        (tmp_path / name).mkdir()
        write_tar(tmp_path / name / "train-0.tar", shard(*samples))
        assert index(tmp_path / name).sample_bytes == size


def test_records_are_stated_and_checked(tmp_path):
    write_tar(tmp_path / "train-0.tar", shard(bytes(24), bytes(12)))
    with pytest.raises(ConfigError, match="--record: the number of tokens of an image is not given"):
        index(tmp_path, "--tokenizer", "pixels")
    with pytest.raises(DataError, match=r"train-0\.tar: member 1 at byte 1024 has 12 tokens, no whole number of .* 24"):
        index(tmp_path, "--record", "24")
    found = index(tmp_path, "--tokenizer", "pixels", "--record", "12")
    assert found.record == 12 and found.tokenizer.name == "pixels" and found.sample_bytes == 24


def test_tokens_that_the_tokenizer_has_not_are_refused(tmp_path):
    tokens = np.array([0, 999, 1000], dtype="<u2").tobytes()
    write_tar(tmp_path / "train-0.tar", shard(tokens[:4], tokens))
    with pytest.raises(DataError, match=r"train-0\.tar: member 1 at byte 1024 has the token 1000, .* are below 1000"):
        index(tmp_path, "--tokenizer", words(tmp_path, 1000))
    with pytest.raises(ConfigError, match=r"--width: 1 byte cannot hold .* 999\. Give 2"):
        index(tmp_path, "--tokenizer", words(tmp_path, 1000), "--width", "1")
    with pytest.raises(ConfigError, match='--tokenizer: there is no tokenizer "byte"'):
        index(tmp_path, "--tokenizer", "byte")
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"000.bin": b"a", "001.txt": b"b"}, r"member 1 \('001\.txt'\) at byte 1024 is not a sample"),
        ({"../0.bin": b"a"}, r"member 0 \('\.\./0\.bin'\) at byte 0 is not a sample"),
        ({"0.bin": special_member("0.bin", tarfile.SYMTYPE)}, "member 0 .* is not a sample"),
        ({"folder": special_member("folder", tarfile.DIRTYPE)}, "member 0 .* is not a sample"),
        ({"0.bin": b"a", "1.bin": b""}, r"member 1 .* at byte 1024 claims 0 bytes"),
        ({}, "it has 0 samples"),
    ],
)
def test_anything_else_in_a_shard_is_named(tmp_path, members, problem):
    write_tar(tmp_path / "train-0.tar", {"0.bin": b"fine"})
    write_tar(tmp_path / "train-1.tar", members)
    with pytest.raises(DataError, match=rf"train-1\.tar: {problem}"):
        index(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train-0.tar", "train-1.tar"]


@pytest.mark.parametrize("size", [1024, 1100, 1600, 0])
def test_a_torn_shard_is_named(tmp_path, size):
    path = write_tar(tmp_path / "train-0.tar", shard(b"a", bytes(600), b"c"))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=rf"train-0\.tar: member \d .*at byte {min(size, 1024)}"):
        index(tmp_path)


def test_an_odd_number_of_bytes_is_no_token(tmp_path):
    write_tar(tmp_path / "train-0.tar", shard(b"ab", b"abc"))
    with pytest.raises(DataError, match=r"member 1 .* at byte 1024 has 3 bytes, no whole number of tokens of 2"):
        index(tmp_path, "--width", "2")


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["train-0.tar", "shard.tar"], r"shard\.tar: its name does not name its split"),
        (["train-0.tar", "train-a b.tar"], r"its name does not name its split"),
        (["train-0.tar", "index.json"], "these shards have an index already"),
        (["a.txt"], "there is no shard here"),
    ],
)
def test_folders_that_are_no_shards(tmp_path, names, problem):
    for name in names:
        write_tar(tmp_path / name, shard(b"a"))
    with pytest.raises(DataError, match=problem):
        index(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        index(tmp_path / "nowhere")


def test_the_command(tmp_path, capsys):
    folder = tmp_path / "my shards"
    folder.mkdir()
    write_tar(folder / "train-0.tar", shard(b"a"))
    prepare_data(["shards", "--source", str(folder)])
    assert f"{folder}: indexed" in capsys.readouterr().out
    assert shlex.split(Index.load(folder).file.command)[1:] == ["prepare-data", "shards", "--source", str(folder)]
    refused(capsys, prepare_data, "shards", "--source", folder)
