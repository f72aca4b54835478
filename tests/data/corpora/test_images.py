import gzip
import tarfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megasparse.data.corpora import images
from megasparse.data.index import Index
from megasparse.data.prepare import prepare
from megasparse.errors import ConfigError, DataError
from tests.data.corpora.pictures import draw, png, read_corpus, special_member, write_files, write_tar
from tests.data.folders import everything, prepared, source_of

ALL = draw(20)
FILES = {f"{i:02d}.png": png(image) for i, image in enumerate(ALL)}
OPTIONS = {"size": 8, "split": None, "seed": 0}


def under(*folders: str) -> dict[str, bytes]:
    """The files, shared out among folders in turn."""
    return {f"{folders[i % len(folders)]}/{name}": content for i, (name, content) in enumerate(FILES.items())}


def numbers(found: np.ndarray) -> list[int]:
    """The names in ALL of these images."""
    return [next(i for i, image in enumerate(ALL) if (image == one).all()) for one in found]


def shared_out(*places: Path, **options: Any) -> dict[str, list[int]]:
    """The names of the images of each split."""
    return {name: numbers(found) for name, found in read_corpus("images", *places, **options).items()}


def sizes(*places: Path, **options: Any) -> dict[str, int]:
    return {name: len(found) for name, found in shared_out(*places, **options).items()}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_folders_and_archives_name_the_split(tmp_path, mode):
    files = under("train", "deep/validation/cats", "test")
    want = {"train": list(range(0, 20, 3)), "validation": list(range(1, 20, 3)), "test": list(range(2, 20, 3))}
    write_files(tmp_path / "folder", {**files, "train/labels.csv": b"x", ".hidden/x.png": b"x", "train/.x.png": b"x"})
    suffix = mode.replace("w", ".tar").replace(":", ".")
    archive = write_tar(tmp_path / f"all{suffix}", {"./README": b"x", "./._x.png": b"x", **files}, mode)
    for place in (tmp_path / "folder", archive):
        assert shared_out(place) == want


def test_several_archives_and_folders_named_for_their_split(tmp_path):
    names = list(FILES)
    archive = write_tar(tmp_path / "train_8x8.tar", {name: FILES[name] for name in reversed(names[:10])})
    folder = write_files(tmp_path / "valid", {name: FILES[name] for name in names[10:]})
    assert shared_out(archive, folder) == {"train": list(range(9, -1, -1)), "validation": list(range(10, 20))}


@pytest.mark.parametrize(
    ("folders", "split"),
    [
        (("a", "training", "test"), "train"),
        (("VAL.1", "train"), "validation"),
        (("trainer", "value", "testimony", "valid_64x64"), "validation"),
        (("trains", "tests", "test_images", "val-set"), None),
        ((), None),
    ],
)
def test_the_first_folder_that_names_a_split(folders, split):
    assert images.split_named(folders) == split


def test_a_permutation_shares_out_images_of_no_named_split(tmp_path):
    place = write_files(tmp_path / "photos", FILES)
    found = shared_out(place, split="50,25,25")
    assert {name: len(each) for name, each in found.items()} == {"train": 10, "validation": 5, "test": 5}
    assert sorted(chain(*found.values())) == list(range(20))
    assert all(each == sorted(each) for each in found.values())
    order = np.argsort(np.random.Philox(np.random.SeedSequence(0)).random_raw(20))
    assert found["test"] == sorted(order[15:].tolist()) == [4, 6, 10, 12, 13]
    assert shared_out(place, split="50,25,25", seed=1) != found
    assert sizes(place) == {"train": 18, "validation": 1, "test": 1}
    named = write_files(tmp_path / "named", under("train", "test"))
    assert sizes(named, split="50,50,0") == {"train": 10, "validation": 10}


def test_shards_hold_the_pixels_of_whole_images(tmp_path):
    place, output = write_files(tmp_path / "photos", under("train", "test")), tmp_path / "data"
    source = source_of(place, kind="raw")
    for written in (True, False):
        again = prepare("images", source, output, options=OPTIONS, sample_bytes=500, shard_bytes=900, command="a test")
        assert again is written
    index = Index.load(output)
    assert index.record == 192 and index.sample_bytes == 384 and index.tokenizer.name == "pixels"
    assert [shard.samples for shard in index.split("train").shards] == [2, 2, 1]
    for name, first in (("train", 0), ("test", 1)):
        assert everything(index, name).tolist() == ALL[first::2].reshape(-1).tolist()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(tmp_path, kind):
    files = {"a.png": FILES["00.png"], "b.png": special_member("b.png", kind)}
    with pytest.raises(DataError, match=r"x\.tar:b\.png: at byte 1024 this is neither a file nor a folder"):
        read_corpus("images", write_tar(tmp_path / "x.tar", files))


def test_names_in_an_archive_are_no_paths(tmp_path, monkeypatch):
    """Nothing is written, whatever a member is called."""
    monkeypatch.chdir(write_files(tmp_path / "here", {}) if (tmp_path / "here").mkdir() else tmp_path / "here")
    files = {"/tmp/absolute.png": FILES["00.png"], "train/../../up.png": FILES["01.png"]}
    found = read_corpus("images", write_tar(tmp_path / "train.tar", files))
    assert numbers(found["train"]) == [0] and not list((tmp_path / "here").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "train.tar"]


def torn(content: bytes, how: str) -> bytes:
    if how == "a header":
        return content[:1024] + b"x" * 300 + content[1324:]
    return content[: {"in a member": 700, "between members": 1024, "in a header": 1100}[how]]


@pytest.mark.parametrize("how", ["a header", "in a member", "between members", "in a header"])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_a_torn_archive_is_refused(tmp_path, how, suffix):
    """The iterator of tarfile takes three of these for the end of the archive."""
    content = torn(write_tar(tmp_path / "whole.tar", FILES).read_bytes(), how)
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(content) if suffix == ".tar.gz" else content)
    with pytest.raises(DataError, match=r"x\.tar.*: this archive cannot be read: .*Get it again"):
        read_corpus("images", path)


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.xz", ".tar.bz2", ".tar"])
def test_torn_compression_is_refused(tmp_path, suffix):
    path = write_tar(tmp_path / f"x{suffix}", FILES, f"w:{suffix.rpartition('.')[2]}" if suffix != ".tar" else "w")
    for content in (path.read_bytes()[: path.stat().st_size // 2], b"hello", b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"x\.tar"):
            read_corpus("images", path)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"a.txt": b"x"}, "there is no image here. Give folders or tar archives of files named .png"),
        ({"train/a.png": FILES["00.png"], "b.png": FILES["01.png"]}, r"b\.png: no folder names the split"),
        ({"train/a.png": FILES["00.png"], "train/b.png": b""}, r"b\.png: this file is empty"),
        ({"train/a.png": FILES["00.png"], "train/b.png": b"x"}, r"train/b\.png: cannot be decoded"),
        ({"train/a.png": png(draw(1, 9)[0])}, r"train/a\.png: this image has 9×9 pixels, 8×8 are expected"),
        ({"a.png": FILES["00.png"]}, "1 images are too few to give train any"),
        ({f"train/{name}": file for name, file in FILES.items()} | {"train/x.png": b"x"}, r"train/x\.png: cannot be"),
    ],
)
def test_bad_sources_are_refused_and_nothing_is_written(tmp_path, files, problem):
    place = write_files(tmp_path / "photos", files)
    with pytest.raises(DataError, match=problem):
        prepared("images", source_of(place, kind="raw"), tmp_path / "data", 500, 900, **OPTIONS)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("options", "problem"), [({"split": "50,50"}, "--split"), ({"seed": -1}, "--seed: -1 is negative")]
)
def test_bad_options_are_refused(tmp_path, options, problem):
    with pytest.raises(ConfigError, match=problem):
        read_corpus("images", write_files(tmp_path, FILES), **options)
