"""Images as tokens: folders, archives, CIFAR-10 and ImageNet at 64×64, and one line for each bad source."""

import gzip
import hashlib
import io
import tarfile
import zlib
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megasparse.data.corpora import CORPORA, image_sets, images
from megasparse.data.corpora.images import PixelEncoder, decode, file_piece, planar_piece
from megasparse.data.index import Index
from megasparse.data.prepare import prepare
from megasparse.errors import ConfigError, DataError
from tests.data.corpora.pictures import (
    GREY,
    PALETTE,
    chunk,
    draw,
    png,
    read_corpus,
    special_member,
    write_files,
    write_tar,
    write_zip,
)
from tests.data.folders import everything, prepared, source_of
from tests.helpers.cases import together
from tests.helpers.commands import refusal

IMAGE = draw(1)[0]


def pixels(content: bytes, side: int = 8) -> np.ndarray:
    return np.frombuffer(decode("folder/one.png", content, side), dtype=np.uint8).reshape(side, side, 3)


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def test_tokens_are_rows_of_pixels_of_red_green_and_blue():
    tokens = PixelEncoder(8).encode(file_piece("one", png(IMAGE)))
    assert tokens.tokens.dtype == np.uint8 and tokens.raw_bytes == 192 and tokens.words == 0
    assert tokens.tokens.tolist() == [int(IMAGE[y, x, c]) for y in range(8) for x in range(8) for c in range(3)]


def test_planes_become_pixels():
    images = draw(3)
    planes = b"".join(images[i, :, :, c].tobytes() for i in range(3) for c in range(3))
    encoder = PixelEncoder(8)
    assert encoder.encode(planar_piece(planes)).tokens.tobytes() == images.tobytes()
    assert (encoder.record, encoder.width, encoder.end, encoder.name) == (192, 1, None, "pixels")


def test_other_colour_modes_are_converted_and_reported(capsys):
    images._report_conversion.cache_clear()
    grey = IMAGE[:, :, 0]
    three = np.repeat(grey[:, :, None], 3, axis=2)
    assert (pixels(png(grey, GREY)) == three).all()
    palette = bytes(range(256)) * 3
    colours = np.frombuffer(palette, dtype=np.uint8).reshape(256, 3)
    assert (pixels(png(grey, PALETTE, more=chunk(b"PLTE", palette))) == colours[grey]).all()
    black_and_white = png(np.packbits(grey > 127, axis=1), GREY, depth=1, size=(8, 8))
    pixels(png(grey, GREY))
    said = [f"{kind} images are converted to RGB: three tokens a pixel" for kind in ("grey", "palette")]
    assert capsys.readouterr().err.splitlines() == said
    assert (pixels(black_and_white) == np.where(three > 127, 255, 0)).all()
    assert (pixels(b"P6\n8 8\n255\n" + IMAGE.tobytes()) == IMAGE).all()
    smooth = np.repeat(np.arange(0, 64, 8, dtype=np.uint8)[:, None], 8, axis=1)[:, :, None].repeat(3, axis=2)
    assert np.abs(pixels(saved(Image.fromarray(smooth), "JPEG", quality=95)).astype(int) - smooth).max() < 4


@together(
    ("content", "problem"),
    [
        (png(draw(1, 9)[0]), r"9×9 pixels, 8×8 are expected\. Scale or crop"),
        (saved(Image.fromarray(draw(1)[0]).convert("RGBA")), "mode RGBA, not just red, green and blue"),
        (saved(Image.fromarray(draw(1)[0]).convert("CMYK"), "JPEG"), "mode CMYK"),
        (png(IMAGE, more=chunk(b"tRNS", bytes(6))), "mode RGB with transparency"),
        (png(np.repeat(IMAGE, 2, axis=2), depth=16, size=(8, 8)), "more than 8 bits"),
        (b"", "no image of a known kind"),
        (saved(Image.fromarray(IMAGE), "GIF"), "no image of a known kind"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "no image of a known kind"),
        (png(IMAGE)[:-60], "cannot be decoded: .*truncated"),
        (saved(Image.fromarray(IMAGE), "JPEG")[:-20], "cannot be decoded: .*truncated"),
        (png(IMAGE, size=(8, 8)).replace(b"IDAT", b"IDAX"), "cannot be decoded"),
        (png(IMAGE)[:-20] + b"x" * 20, "cannot be decoded"),
        (bytes(20_000_000), "20,000,000 bytes are too many"),
    ],
)
def test_bad_images_are_rejected_in_one_line(content, problem):
    refusal(lambda: pixels(content), match=rf"^folder/one\.png: .*{problem}")


@pytest.mark.parametrize("side", [20_000, 1 << 30])
def test_a_bomb_is_not_decoded(side):
    """An image that claims gigabytes is rejected by its header."""
    with pytest.raises(DataError, match=r"one\.png: (this image has 20000×20000|cannot be decoded: Image size)"):
        pixels(png(IMAGE, size=(side, side)))


def test_a_bomb_of_text_is_not_unpacked():
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(80_000_000), 9))
    refusal(lambda: pixels(png(IMAGE, more=text)), match=r"one\.png: cannot be decoded")


def test_any_damage_is_a_line_or_leaves_an_image_of_the_size():
    """A flipped byte anywhere in a file is an error or gives some image; Pillow raises nothing else."""
    drawn = np.random.default_rng(0)
    image = np.full((8, 8, 3), 90, dtype=np.uint8)
    for content in (png(IMAGE), saved(Image.fromarray(image), "JPEG"), saved(Image.fromarray(image), "WEBP")):
        for place in drawn.integers(0, len(content), 60):
            damaged = content[:place] + bytes([content[place] ^ int(drawn.integers(1, 256))]) + content[place + 1 :]
            try:
                assert pixels(damaged).shape == (8, 8, 3)
            except DataError as error:
                assert "\n" not in str(error)


def test_names_are_shown_safely():
    with pytest.raises(DataError, match=r"^a\\x1b\[31m\\n: cannot be decoded") as caught:
        PixelEncoder(8).encode(file_piece("a\x1b[31m\n", b"x"))
    assert str(caught.value).isprintable()
    refusal(lambda: PixelEncoder(8).encode(file_piece("\udcff\0x", b"x")), match=r"^\\udcff\?x: ")


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


@together("mode", ["w", "w:gz", "w:xz", "zip"])
def test_folders_and_archives_name_the_split(tmp_path, mode, capsys):
    files = under("train", "deep/validation/cats", "test")
    want = {"train": list(range(0, 20, 3)), "validation": list(range(1, 20, 3)), "test": list(range(2, 20, 3))}
    write_files(tmp_path / "folder", {**files, "train/labels.csv": b"x", ".hidden/x.png": b"x", "train/.x.png": b"x"})
    suffix = mode.replace("w", ".tar").replace(":", ".")
    inside = {"./README": b"x", "./._x.png": b"x", **files}
    if mode == "zip":
        archive = write_zip(tmp_path / "all.zip", {"__MACOSX/a.png": b"x", **inside})
    else:
        archive = write_tar(tmp_path / f"all{suffix}", inside, mode)
    for place in (tmp_path / "folder", archive):
        assert shared_out(place) == want
    (hidden, others) = capsys.readouterr().err.splitlines()
    assert "folder: 21 files are read, 2 left out (.hidden/x.png, train/.x.png): they are hidden" in hidden
    assert "folder: 20 files are read, 1 left out (train/labels.csv): their names end otherwise" in others


@together(
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
    assert index.record == 192 and index.sample_bytes == 384 and index.file.tokenizer.name == "pixels"
    assert [shard.samples for shard in index.split("train").shards] == [2, 2, 1]
    for name, first in (("train", 0), ("test", 1)):
        assert everything(index, name).tolist() == ALL[first::2].reshape(-1).tolist()


@together("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_rejected(tmp_path, kind):
    files = {"a.png": FILES["00.png"], "b.png": special_member("b.png", kind)}
    with pytest.raises(DataError, match=r"x\.tar:b\.png: at byte 1024 this is neither a file nor a folder"):
        read_corpus("images", write_tar(tmp_path / "x.tar", files))


def test_archive_names_never_become_paths(tmp_path, monkeypatch):
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


@together("how", ["a header", "in a member", "between members", "in a header"])
@together("suffix", [".tar", ".tar.gz"])
def test_a_torn_archive_is_rejected(tmp_path, how, suffix):
    """The iterator of tarfile takes three of these for the end of the archive."""
    content = torn(write_tar(tmp_path / "whole.tar", FILES).read_bytes(), how)
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(content) if suffix == ".tar.gz" else content)
    refusal(lambda: read_corpus("images", path), match=r"x\.tar.*: this archive cannot be read: .*Get it again")


@together(
    ("files", "problem"),
    [
        ({"a.txt": b"x"}, "contains no images. Give folders or archives of files named .png"),
        ({"train/a.png": FILES["00.png"], "b.png": FILES["01.png"]}, r"b\.png: no folder names the split"),
        ({"train/a.png": FILES["00.png"], "train/b.png": b""}, r"b\.png: this file is empty"),
        ({"train/a.png": FILES["00.png"], "train/b.png": b"x"}, r"train/b\.png: cannot be decoded"),
        ({"a.png": FILES["00.png"]}, "1 images are too few to give train any"),
    ],
)
def test_bad_sources_are_rejected_and_nothing_is_written(tmp_path, files, problem):
    place = write_files(tmp_path / "photos", files)
    with pytest.raises(DataError, match=problem):
        prepared("images", source_of(place, kind="raw"), tmp_path / "data", 500, 900, **OPTIONS)
    assert not (tmp_path / "data").exists()


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
    for place in (folder, write_tar(tmp_path / "cifar.tar.gz", inside, "w:gz")):
        found = read_corpus("cifar10", place)
        assert (found["train"] == CIFAR[:270]).all()
        assert (found["validation"] == CIFAR[270:300]).all()
        assert (found["test"] == CIFAR[300:]).all()


def test_images_in_folders_of_classes(tmp_path):
    files = {f"cifar10/{'test' if i < 10 else 'train'}/cat/{i:04d}.png": png(CIFAR[i]) for i in range(40)}
    found = read_corpus("cifar10", write_tar(tmp_path / "cifar10-png.tar.xz", files, "w:xz"))
    assert (found["test"] == CIFAR[:10]).all()
    assert (found["validation"] == CIFAR[[19, 29, 39]]).all()
    assert (found["train"] == np.delete(CIFAR[10:40], [9, 19, 29], axis=0)).all()


def test_the_official_archive_is_verified(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "cifar-10-binary.tar.gz", binary(), "w:gz")
    with pytest.raises(DataError, match=r"binary\.tar\.gz: its md5 is \w+…, not c32a1d4ab5d0…"):
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
    refusal(lambda: read_corpus("cifar10", write_files(tmp_path, {name: png(image)})), match=problem)


TRAIN, VALID = draw(150, 64), draw(3, 64, seed=1)


def batch(images: np.ndarray, **arrays: object) -> bytes:
    """An npz file as the official ones are: planes, labels from 1, the mean."""
    file = io.BytesIO()
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    np.savez(file, **{"data": planes, "labels": np.ones(len(images), dtype=np.int64), "mean": planes.mean(0), **arrays})
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
    tars = [write_tar(tmp_path / "train_64x64.tar.gz", train, "w:gz"), write_tar(tmp_path / "valid_64x64.tgz", valid)]
    folder = write_files(tmp_path / "extracted", {**train, **valid})
    zips = [write_zip(tmp_path / "train_64x64.zip", train), write_zip(tmp_path / "valid_64x64.zip", valid)]
    for places in (tars, zips, [folder], [folder / "train_64x64", folder / "valid_64x64"]):
        found = read_corpus("imagenet64", *places)
        assert (found["train"] == np.delete(TRAIN[:130], 127, axis=0)).all()
        assert (found["validation"] == TRAIN[127:128]).all() and (found["test"] == VALID).all()
        assert imagenet64_about(*places) == {"downsampling": "pixelrnn", "verified": []}


def test_user_images_are_split_and_need_a_resampling_method(tmp_path):
    place = write_tar(tmp_path / "sample.tar", {f"{i}.png": png(image) for i, image in enumerate(TRAIN[:20])})
    found = read_corpus("imagenet64", place, downsampling="box")
    assert {name: len(images) for name, images in found.items()} == {"train": 18, "validation": 1, "test": 1}
    assert imagenet64_about(place, downsampling="pixelrnn")["downsampling"] == "pixelrnn"
    with pytest.raises(ConfigError, match=r"--downsampling: the source does not say .* Give box .* or pixelrnn"):
        imagenet64_about(place)


@together(
    ("files", "problem"),
    [
        ({"train_data_batch_3": b"\x80\x02}q\0."}, r"train_data_batch_3: this batch is a pickle.*npz version"),
        ({"Imagenet64_val.zip": {"val_data": b"\x80\x02}q\0."}}, r"no npz batch here \(val_data\).*are pickles"),
        (
            {"val_data.npz": batch(VALID, data=np.array([[{}] * 12288]))},
            r"`data` is object \(1, 12288\), uint8 \(images",
        ),
        ({"val_data.npz": batch(VALID, data=np.zeros((3, 12288), np.int64))}, r"`data` is int64"),
        ({"val_data.npz": batch(VALID)[:-3000]}, "cannot be read: File is not a zip"),
        ({"val_data.npz": batch(VALID)[:5000] + b"x" * 9 + batch(VALID)[5009:]}, "cannot be read: Bad CRC"),
        ({"val_data.npz": batch(VALID), "a.png": png(VALID[0])}, r"a\.png: this is no npz batch, as others"),
        ({"train_64x64/a.png": png(draw(1, 32)[0])}, "has 32×32 pixels, 64×64 are expected"),
    ],
)
def test_files_of_another_data_set_are_rejected(tmp_path, files, problem):
    for name, content in files.items():
        if isinstance(content, dict):
            write_zip(tmp_path / name, content)
        else:
            write_files(tmp_path, {name: content})
    refusal(lambda: read_corpus("imagenet64", tmp_path), match=problem)


def test_an_image_is_turned_as_its_orientation_says():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it clockwise by 90 degrees
    picture, turned = draw(1)[0], np.rot90(draw(1)[0], -1)
    side = len(picture)
    assert decode("x", saved(Image.fromarray(picture), exif=exif), side) == turned.tobytes()
