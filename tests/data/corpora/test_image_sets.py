"""CIFAR-10 and ImageNet at 64×64: official files, images in folders, and one line for each bad source."""

import hashlib
import io
from pathlib import Path

import numpy as np
import pytest

from megasparse.data.corpora import CORPORA, image_sets
from megasparse.errors import ConfigError, DataError
from tests.data.corpora.pictures import draw, png, read_corpus, write_files, write_tar, write_zip
from tests.data.folders import source_of
from tests.helpers.refusals import refusal

RECORDS = 60
CIFAR = draw(6 * RECORDS, 32)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Batches of 60 images, 30 of them for validation, read 25 at a time."""
    monkeypatch.setattr(image_sets, "RECORDS", RECORDS)
    monkeypatch.setattr(image_sets.Cifar10, "VALIDATION", 30)
    monkeypatch.setattr(image_sets.Cifar10, "PIECE", 25)
    yield


def binary() -> dict[str, bytes]:
    """The official files: for each image a label and its planes."""
    files = {"batches.meta.txt": b"airplane\n"}
    for number, name in enumerate(image_sets.BATCHES):
        planes = CIFAR[number * RECORDS :][:RECORDS].transpose(0, 3, 1, 2).reshape(RECORDS, -1)
        files[name] = np.hstack([np.full((RECORDS, 1), 255, dtype=np.uint8), planes]).tobytes()
    return files


def test_the_binary_version_in_files_and_in_its_archive(tmp_path):
    files = binary()
    folder = write_files(tmp_path / "cifar-10-batches-bin", files)
    inside = {f"cifar-10-batches-bin/{name}": content for name, content in reversed(files.items())}
    archive = write_tar(tmp_path / "cifar.tar.gz", inside, "w:gz")
    for place in (folder, archive):
        found = read_corpus("cifar10", place)
        assert (found["train"] == CIFAR[:270]).all()
        assert (found["validation"] == CIFAR[270:300]).all()
        assert (found["test"] == CIFAR[300:]).all()


def test_the_sizes_are_those_of_the_data_set(monkeypatch):
    monkeypatch.undo()
    assert (image_sets.RECORD, image_sets.RECORDS, image_sets.Cifar10.VALIDATION) == (3073, 10_000, 5_000)
    assert image_sets.Cifar10.MD5 == {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}


def test_images_in_folders_of_classes(tmp_path):
    files = {f"cifar10/{'test' if i < 10 else 'train'}/cat/{i:04d}.png": png(CIFAR[i]) for i in range(40)}
    found = read_corpus("cifar10", write_tar(tmp_path / "cifar10-png.tar.xz", files, "w:xz"))
    assert (found["test"] == CIFAR[:10]).all()
    assert (found["validation"] == CIFAR[[19, 29, 39]]).all()
    assert (found["train"] == np.delete(CIFAR[10:40], [9, 19, 29], axis=0)).all()


def test_the_official_archive_is_verified(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "cifar-10-binary.tar.gz", binary(), "w:gz")
    with pytest.raises(DataError, match=r"binary\.tar\.gz: its md5 is \w+…, the official file's is c32a1d4ab5d0…"):
        read_corpus("cifar10", path)
    monkeypatch.setitem(image_sets.Cifar10.MD5, path.name, hashlib.md5(path.read_bytes()).hexdigest())
    assert len(read_corpus("cifar10", path)["test"]) == RECORDS


@pytest.mark.parametrize("archive", [False, True])
def test_pickled_batches_are_never_read(tmp_path, archive, monkeypatch):
    """The pickle here would make a file in the working folder."""
    monkeypatch.chdir(tmp_path)
    files = {"data_batch_1": b"cposix\nsystem\n(S'touch marker'\ntR."}
    if archive:
        place = write_tar(tmp_path / "cifar-10-python.tar.gz", {f"py/{n}": c for n, c in files.items()}, "w:gz")
    else:
        place = write_files(tmp_path / "py", files)
    with pytest.raises(DataError, match=r"data_batch_1: this batch is a pickle.* Give .*cifar-10-binary\.tar\.gz"):
        read_corpus("cifar10", place)
    assert not (tmp_path / "marker").exists()


def test_batches_that_are_missing_or_short_are_named(tmp_path):
    files = binary()
    short = write_files(tmp_path / "short", {**files, "data_batch_2.bin": files["data_batch_2.bin"][:-1]})
    with pytest.raises(DataError, match=r"data_batch_2\.bin: this batch has 184,379 bytes, 184,380 are expected"):
        read_corpus("cifar10", short)
    del files["data_batch_4.bin"]
    with pytest.raises(DataError, match=r"data_batch_4\.bin is not here\. Give all six batches"):
        read_corpus("cifar10", write_files(tmp_path / "missing", files))


@pytest.mark.parametrize(
    ("name", "image", "problem"),
    [("a.png", CIFAR[0], "no folder names the split"), ("train/a.png", draw(1, 64)[0], "64×64 pixels, 32×32 are")],
)
def test_images_that_are_not_of_the_data_set(tmp_path, name, image, problem):
    with pytest.raises(DataError, match=problem):
        read_corpus("cifar10", write_files(tmp_path, {name: png(image)}))


TRAIN, VALID = draw(150, 64), draw(3, 64, seed=1)


def batch(images: np.ndarray, **arrays: object) -> bytes:
    """An npz file as the official ones are: planes, labels from 1, the mean."""
    file = io.BytesIO()
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    content = {"data": planes, "labels": np.ones(len(images), dtype=np.int64), "mean": planes.mean(0), **arrays}
    np.savez(file, **content)
    return file.getvalue()


def imagenet64_about(*locations: Path, **settings: object) -> dict[str, object]:
    given = {"downsampling": None, "split": None, "seed": 0, **settings}
    return CORPORA["imagenet64"].about(source_of(*locations, kind="raw"), given)


NPZ_BATCHES = {
    "train_data_batch_1.npz": TRAIN[:100],
    "train_data_batch_2.npz": TRAIN[100:120],
    "train_data_batch_10.npz": TRAIN[120:],
    "val_data.npz": VALID,
}


def test_batches_in_files_and_zips_are_their_images_in_order(tmp_path):
    files = {name: batch(images) for name, images in NPZ_BATCHES.items()}
    folder = write_files(tmp_path / "numbers", files)
    names = list(files)
    part1 = write_zip(tmp_path / "part1.zip", {f"part1/{name}": files[name] for name in reversed(names[:2])})
    part2 = write_zip(tmp_path / "part2.zip", {name: files[name] for name in names[2:]})
    for places in ([folder], [part2, part1]):
        found = read_corpus("imagenet64", *places)
        assert list(found) == ["train", "validation", "test"]
        assert (found["train"] == np.delete(TRAIN, 127, axis=0)).all()
        assert (found["validation"] == TRAIN[127:128]).all()
        assert (found["test"] == VALID).all()
        assert imagenet64_about(*places) == {"downsampling": "box", "verified": []}


def test_the_older_version_is_recognised_by_its_names(tmp_path):
    train = {f"train_64x64/{i:04d}.png": png(image) for i, image in enumerate(TRAIN[:130])}
    valid = {f"valid_64x64/{i:04d}.png": png(image) for i, image in enumerate(VALID)}
    archives = [
        write_tar(tmp_path / "train_64x64.tar.gz", train, "w:gz"),
        write_tar(tmp_path / "valid_64x64.tgz", valid),
    ]
    folder = write_files(tmp_path / "extracted", {**train, **valid})
    for places in (archives, [folder], [folder / "train_64x64", folder / "valid_64x64"]):
        found = read_corpus("imagenet64", *places)
        assert (found["train"] == np.delete(TRAIN[:130], 127, axis=0)).all()
        assert (found["validation"] == TRAIN[127:128]).all() and (found["test"] == VALID).all()
        assert imagenet64_about(*places) == {"downsampling": "pixelrnn", "verified": []}


def test_images_of_ones_own_are_shared_out_and_must_say_how_they_were_made(tmp_path):
    place = write_tar(tmp_path / "sample.tar", {f"{i}.png": png(image) for i, image in enumerate(TRAIN[:20])})
    found = read_corpus("imagenet64", place, downsampling="box")
    assert {name: len(images) for name, images in found.items()} == {"train": 18, "validation": 1, "test": 1}
    assert imagenet64_about(place, downsampling="pixelrnn")["downsampling"] == "pixelrnn"
    with pytest.raises(ConfigError, match=r"--downsampling: the source does not say .* Give box .* or pixelrnn"):
        imagenet64_about(place)


def test_official_files_are_verified(tmp_path, monkeypatch):
    path = write_zip(tmp_path / "Imagenet64_val_npz.zip", {"val_data.npz": batch(VALID)})
    with pytest.raises(DataError, match=r"val_npz\.zip: its sha256 is \w+…, the official file's is e1e75133158a…"):
        imagenet64_about(path)
    monkeypatch.setitem(image_sets.ImageNet64.SHA256, path.name, hashlib.sha256(path.read_bytes()).hexdigest())
    assert imagenet64_about(path) == {"downsampling": "box", "verified": [path.name]}


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"train_data_batch_3": b"\x80\x02}q\0."}, r"train_data_batch_3: this batch is a pickle.*npz version"),
        ({"val_data": b"x"}, "val_data: this batch is a pickle"),
        ({"Imagenet64_val.zip": {"val_data": b"\x80\x02}q\0."}}, r"no npz batch here \(val_data\).*are pickles"),
        (
            {"val_data.npz": batch(VALID, data=np.array([[{}] * 12288], dtype=object))},
            r"`data` is object \(1, 12288\), uint8 \(images, 12288\)",
        ),
        ({"val_data.npz": batch(VALID, data=np.zeros((3, 3072), np.uint8))}, r"`data` is uint8 \(3, 3072\)"),
        ({"val_data.npz": batch(VALID, data=np.zeros((3, 12288), np.int64))}, r"`data` is int64"),
        ({"val_data.npz": batch(VALID, data=np.zeros((12288, 3), np.uint8).T)}, r"`data` is uint8 \(3, 12288\)"),
        ({"val_data.npz": batch(VALID)[:-3000]}, "cannot be read: File is not a zip"),
        ({"val_data.npz": batch(VALID)[:5000] + b"x" * 9 + batch(VALID)[5009:]}, "cannot be read: Bad CRC"),
        ({"val_data.npz": batch(VALID), "a.png": png(VALID[0])}, r"a\.png: this is no npz batch, as others"),
        ({"x.zip": {"val_data.npz": batch(VALID)[:-3000]}}, "cannot be read: File is not a zip"),
        ({"train_64x64/a.png": png(draw(1, 32)[0])}, "has 32×32 pixels, 64×64 are expected"),
    ],
)
def test_what_is_not_the_data_set_is_refused(tmp_path, files, problem):
    for name, content in files.items():
        if isinstance(content, dict):
            write_zip(tmp_path / name, content)
        else:
            write_files(tmp_path, {name: content})
    refusal(lambda: read_corpus("imagenet64", tmp_path), match=problem)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"split": "90,5,5"}, "--split: the official batches are"),
        ({"downsampling": "pixelrnn"}, "Leave it out: .* box"),
    ],
)
def test_options_that_official_files_decide_are_refused(tmp_path, options, problem):
    write_files(tmp_path, {"val_data.npz": batch(VALID)})
    with pytest.raises(ConfigError, match=problem):
        read_corpus("imagenet64", tmp_path, **options)
