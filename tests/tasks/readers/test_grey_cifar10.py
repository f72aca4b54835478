import itertools
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from megasparse.errors import DataError
from megasparse.tasks.readers.long_range_arena import grey
from megasparse.tasks.task import split_files

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORD = 3073
OFFICIAL = 10_000 * RECORD


def picture(seed: int) -> np.ndarray:
    """Random picture, uint8 (32, 32, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def record(label: int, pixels: np.ndarray) -> bytes:
    """A record as the binary version has it: the label, then all red, all green and all blue values, row by row."""
    return bytes([label]) + b"".join(pixels[..., channel].tobytes() for channel in range(3))


def defined(pixels: np.ndarray) -> list[int]:
    """The grey values by TensorFlow's definition, in fractions."""
    weights = (Fraction(2989, 10_000), Fraction(5870, 10_000), Fraction(1140, 10_000))
    values = []
    for colours in pixels.reshape(-1, 3).tolist():
        luma = sum(weight * Fraction(colour, 255) for weight, colour in zip(weights, colours, strict=True))
        values.append(int(luma * (255 + Fraction(1, 2))))
    return values


def test_grey_is_what_tensorflow_makes_of_it():
    edges = np.array(list(itertools.product((0, 1, 127, 128, 254, 255), repeat=3)), dtype=np.uint8)
    for pixels in (edges, picture(0)):
        assert grey(pixels).tolist() == defined(pixels)
    colours = picture(1)
    scaled = colours.astype(np.float32) * np.float32(1 / 255) @ np.array([0.2989, 0.5870, 0.1140], dtype=np.float32)
    differing = grey(colours) - (scaled * np.float32(255.5)).astype(np.uint8).reshape(-1)
    assert np.abs(differing).max() <= 1 and np.count_nonzero(differing) <= 2  # float32 rounds a few to the other side
    same = np.arange(256, dtype=np.uint8).repeat(3).reshape(-1, 3)
    assert grey(same).tolist() == list(range(256))


def test_records_of_the_binary_version(task, tmp_path):
    path = tmp_path / "mine.bin"
    path.write_bytes(record(9, picture(2)) + record(0, picture(3)))
    first, second = task.read(path)
    assert first.inputs[0].tolist() == defined(picture(2)) and second.inputs[0].tolist() == defined(picture(3))
    assert first.inputs[0].shape == (1024,) and first.inputs[0].dtype == np.int64
    assert (first.label, first.name, str(first.location)) == (9, "0", f"{path}:1")
    assert (second.label, second.name, str(second.location)) == (0, "1", f"{path}:2")
    assert task.classes == CLASSES and task.vocabulary == 256


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_the_official_batches_are_the_splits(task, tmp_path, inner):
    folder = tmp_path / inner
    folder.mkdir(exist_ok=True)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        with open(folder / name, "wb") as stream:
            stream.write(record(4, picture(5)))
            stream.truncate(OFFICIAL)
    assert task.files(tmp_path) == {
        "train": [folder / f"data_batch_{number}.bin" for number in range(1, 6)],
        "test": [folder / "test_batch.bin"],
    }
    first = next(iter(task.read(folder / "data_batch_3.bin")))
    assert first.label == 4 and first.inputs[0].tolist() == defined(picture(5))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("data_batch_1.bin", record(1, picture(0)), r"data_batch_1\.bin: this batch has 3,073 bytes, 30,730,000 are"),
        ("mine.bin", record(1, picture(0))[:-1], r"mine\.bin: this batch has 3,072 bytes, a multiple of 3,073"),
        ("mine.bin", record(1, picture(0)) + record(10, picture(1)), r"mine\.bin:2: the label 10 is none of 0 … 9"),
    ],
)
def test_damaged_batches_are_named(task, tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        list(task.read(tmp_path / name))


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-py"])
def test_the_pickled_version_is_refused(task, tmp_path, inner):
    (tmp_path / inner).mkdir(exist_ok=True)
    (tmp_path / inner / "data_batch_1").write_bytes(b"\x80\x02}q\x01.")
    with pytest.raises(DataError, match=r"data_batch_1: this batch is a pickle.*binary version"):
        split_files(task, tmp_path, "train")


@pytest.fixture
def folder(tmp_path):
    """Images in {train,test}/CLASS, of two formats in the first class."""
    for split in ("train", "test"):
        for number, name in enumerate(CLASSES):
            (tmp_path / split / name).mkdir(parents=True)
            Image.fromarray(picture(number)).save(tmp_path / split / name / "0002.png")
        Image.fromarray(picture(10)).save(tmp_path / split / CLASSES[0] / "0010.PNG")
        Image.fromarray(picture(11)).save(tmp_path / split / CLASSES[0] / "0001.jpg")
    return tmp_path


def test_folders_of_images(task, folder):
    assert task.files(folder) == {"train": [folder / "train"], "test": [folder / "test"]}
    examples = list(task.read(folder / "train"))
    names = [f"{CLASSES[0]}/{number}" for number in ("0001", "0002", "0010")]
    assert [example.name for example in examples] == names + [f"{name}/0002" for name in CLASSES[1:]]
    assert [example.label for example in examples] == [0, 0, 0, *range(1, 10)]
    for example, seed in zip(examples[1:], (0, 10, *range(1, 10)), strict=True):
        assert example.inputs[0].tolist() == defined(picture(seed))
    with Image.open(folder / "train" / CLASSES[0] / "0001.jpg") as lossy:
        assert examples[0].inputs[0].tolist() == defined(np.array(lossy))
    assert str(examples[0].location) == str(folder / "train" / CLASSES[0] / "0001.jpg")
