import hashlib
import tarfile

import numpy as np
import pytest

from megasparse.data.corpora import cifar10
from megasparse.errors import DataError
from tests.data.corpora.pictures import draw, png, read_corpus, special_member, write_files, write_tar

RECORDS = 60
IMAGES = draw(6 * RECORDS, 32)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Batches of 60 images, 30 of them for validation, read 25 at a time."""
    monkeypatch.setattr(cifar10, "RECORDS", RECORDS)
    monkeypatch.setattr(cifar10, "VALIDATION", 30)
    monkeypatch.setattr(cifar10, "PIECE", 25)
    yield


def binary() -> dict[str, bytes]:
    """The official files: for each image a label and its planes."""
    files = {"batches.meta.txt": b"airplane\n"}
    for number, name in enumerate(cifar10.BATCHES):
        planes = IMAGES[number * RECORDS :][:RECORDS].transpose(0, 3, 1, 2).reshape(RECORDS, -1)
        files[name] = np.hstack([np.full((RECORDS, 1), 255, dtype=np.uint8), planes]).tobytes()
    return files


def test_the_binary_version_in_files_and_in_its_archive(tmp_path):
    files = binary()
    folder = write_files(tmp_path / "cifar-10-batches-bin", files)
    inside = {f"cifar-10-batches-bin/{name}": content for name, content in reversed(files.items())}
    archive = write_tar(tmp_path / "cifar.tar.gz", inside, "w:gz")
    for place in (folder, archive):
        found = read_corpus("cifar10", place)
        assert (found["train"] == IMAGES[:270]).all()
        assert (found["validation"] == IMAGES[270:300]).all()
        assert (found["test"] == IMAGES[300:]).all()


def test_the_sizes_are_those_of_the_data_set(monkeypatch):
    monkeypatch.undo()
    assert (cifar10.RECORD, cifar10.RECORDS, cifar10.VALIDATION) == (3073, 10_000, 5_000)
    assert cifar10.MD5 == {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}


def test_images_in_folders_of_classes(tmp_path):
    files = {f"cifar10/{'test' if i < 10 else 'train'}/cat/{i:04d}.png": png(IMAGES[i]) for i in range(40)}
    found = read_corpus("cifar10", write_tar(tmp_path / "cifar10-png.tar.xz", files, "w:xz"))
    assert (found["test"] == IMAGES[:10]).all()
    assert (found["validation"] == IMAGES[[19, 29, 39]]).all()
    assert (found["train"] == np.delete(IMAGES[10:40], [9, 19, 29], axis=0)).all()


def test_the_official_archive_is_verified(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "cifar-10-binary.tar.gz", binary(), "w:gz")
    with pytest.raises(DataError, match=r"binary\.tar\.gz: its md5 is \w+…, the official file's is c32a1d4ab5d0…"):
        read_corpus("cifar10", path)
    monkeypatch.setitem(cifar10.MD5, path.name, hashlib.md5(path.read_bytes()).hexdigest())
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
    [("a.png", IMAGES[0], "no folder names the split"), ("train/a.png", draw(1, 64)[0], "64×64 pixels, 32×32 are")],
)
def test_images_that_are_not_of_the_data_set(tmp_path, name, image, problem):
    with pytest.raises(DataError, match=problem):
        read_corpus("cifar10", write_files(tmp_path, {name: png(image)}))


def test_a_link_in_place_of_a_batch_is_not_followed(tmp_path):
    links = {name: special_member(name, tarfile.SYMTYPE) for name in binary()}
    with pytest.raises(DataError, match=r"neither a file nor a folder"):
        read_corpus("cifar10", write_tar(tmp_path / "x.tar", links))
