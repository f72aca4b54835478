"""Images of Long Range Arena: grey CIFAR-10 and Pathfinder, of official files and of folders."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features
from datasets import Image as ImageFeature
from PIL import Image

import megasparse.attention  # noqa: F401  (registers the mechanisms)
from megasparse.config.finetuning import TaskConfig
from megasparse.errors import DataError
from megasparse.tasks.catalog import build_task
from megasparse.tasks.readers.images import grey
from megasparse.tasks.task import split_files
from tests.helpers.commands import refusal

CIFAR10 = build_task(TaskConfig(name="grey_cifar10"))

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def defined(pixels: np.ndarray) -> list[int]:
    """The grey values by TensorFlow's definition, in fractions."""
    weights = (Fraction(2989, 10_000), Fraction(5870, 10_000), Fraction(1140, 10_000))
    values = []
    for colours in pixels.reshape(-1, 3).tolist():
        luma = sum(weight * Fraction(colour, 255) for weight, colour in zip(weights, colours, strict=True))
        values.append(int(luma * (255 + Fraction(1, 2))))
    return values


def test_grey_pixels_equal_tensorflow():
    edges = np.array(list(itertools.product((0, 1, 127, 128, 254, 255), repeat=3)), dtype=np.uint8)
    for pixels in (edges, picture(0)):
        assert grey(pixels).tolist() == defined(pixels)
    colours = picture(1)
    scaled = colours.astype(np.float32) * np.float32(1 / 255) @ np.array([0.2989, 0.5870, 0.1140], dtype=np.float32)
    differing = grey(colours) - (scaled * np.float32(255.5)).astype(np.uint8).reshape(-1)
    assert np.abs(differing).max() <= 1 and np.count_nonzero(differing) <= 2  # float32 rounds a few to the other side
    assert grey(np.arange(256, dtype=np.uint8).repeat(3).reshape(-1, 3)).tolist() == list(range(256))


def test_a_dataset_of_images(tmp_path):
    features = Features({"img": ImageFeature(), "label": ClassLabel(names=list(CLASSES))})
    rows = {"img": [Image.fromarray(picture(2)), Image.fromarray(picture(3))], "label": [9, 0]}
    DatasetDict(train=Dataset.from_dict(rows, features=features)).save_to_disk(str(tmp_path / "data"))
    (file,) = CIFAR10.files(tmp_path / "data")["train"]
    first, second = CIFAR10.read(file)
    assert first.inputs[0].tolist() == defined(picture(2)) and second.inputs[0].tolist() == defined(picture(3))
    assert first.inputs[0].shape == (1024,) and first.inputs[0].dtype == np.int64
    assert (first.label, second.label, second.name) == (9, 0, "1") and CIFAR10.vocabulary == 256


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "test"):
        for number, name in enumerate(CLASSES):
            (tmp_path / split / name).mkdir(parents=True)
            Image.fromarray(picture(number)).save(tmp_path / split / name / "0002.png")
        Image.fromarray(picture(10)).save(tmp_path / split / CLASSES[0] / "0010.PNG")
        Image.fromarray(picture(11)).save(tmp_path / split / CLASSES[0] / "0001.jpg")
    return tmp_path


def test_folders_of_images(folder):
    assert CIFAR10.files(folder) == {"train": [folder / "train"], "test": [folder / "test"]}
    examples = list(CIFAR10.read(folder / "train"))
    names = [f"{CLASSES[0]}/{number}" for number in ("0001", "0002", "0010")]
    assert [example.name for example in examples] == names + [f"{name}/0002" for name in CLASSES[1:]]
    assert [example.label for example in examples] == [0, 0, 0, *range(1, 10)]
    for example, seed in zip(examples[1:], (0, 10, *range(1, 10)), strict=True):
        assert example.inputs[0].tolist() == defined(picture(seed))
    with Image.open(folder / "train" / CLASSES[0] / "0001.jpg") as lossy:
        assert examples[0].inputs[0].tolist() == defined(np.array(lossy))
    assert str(examples[0].location) == str(folder / "train" / CLASSES[0] / "0001.jpg")


PATHFINDER = build_task(TaskConfig(name="pathfinder"))


@pytest.fixture
def level(tmp_path):
    """A level as lra_release has it: 12 metadata files with two images each, label 1 where their numbers are even."""
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    (folder / "metadata").mkdir(parents=True)
    for number in range(12):
        (folder / "imgs" / str(number)).mkdir(parents=True)
        rows = []
        for sample in range(2):
            image = Image.fromarray(picture(2 * number + sample)[..., 0])
            image.save(folder / "imgs" / str(number) / f"sample_{sample}.png")
            rows.append(f"imgs/{number} sample_{sample}.png {sample} {(number + sample + 1) % 2} 1.0 14 4 2 0.5 1 1\n")
        (folder / "metadata" / f"{number}.npy").write_text("".join(rows))
    return folder


def test_images_and_labels_equal_the_metadata(level):
    first, second = PATHFINDER.read(level / "metadata" / "3.npy")
    assert first.inputs[0].tolist() == picture(6)[..., 0].reshape(-1).tolist() and first.inputs[0].dtype == np.int64
    assert second.inputs[0].tolist() == picture(7)[..., 0].reshape(-1).tolist()
    assert (first.label, second.label) == (0, 1) and PATHFINDER.vocabulary == 256 and PATHFINDER.classes == ("0", "1")
    assert (first.name, str(second.location)) == ("imgs/3/sample_0.png", f"{level}/metadata/3.npy:2")


def test_the_splits_are_the_first_and_last_tenths_in_the_order_of_the_numbers(level):
    numbers = {split: [int(path.stem) for path in files] for split, files in PATHFINDER.files(level).items()}
    assert numbers == {"train": list(range(9)), "validation": [9], "test": [10, 11]}
    labels = [example.label for file in split_files(PATHFINDER, level, "test") for example in PATHFINDER.read(file)]
    assert labels == [1, 0, 0, 1]


def test_arrays_are_not_read(tmp_path):
    path = tmp_path / "0.npy"
    np.save(path, np.array([["imgs/0", "sample_0.png"]], dtype=object), allow_pickle=True)
    refusal(lambda: PATHFINDER.read(path), match=r"0\.npy: a numpy array, which can contain pickles.*text")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("../../secret sample_0.png 0 1", r'0\.npy:1: "\.\./\.\./secret sample_0\.png 0 1" is not a line of metadata'),
        ("imgs/0 ../sample_0.png 0 1", r"0\.npy:1: .* is not a line of metadata. Write: imgs/0 sample_7\.png 7 1"),
        ("imgs/0 sample_0.png 0 2", r'0\.npy:1: "2" is not a label of pathfinder'),
        ("imgs/0 sample_99.png 99 1", r"0\.npy:1: .*imgs/0/sample_99\.png is missing"),
    ],
)
def test_lines_that_name_no_image_are_named(level, row, said):
    (level / "metadata" / "0.npy").write_text(f"{row}\n")
    refusal(lambda: PATHFINDER.read(level / "metadata" / "0.npy"), match=said)


def test_images_that_do_not_fit_are_named(level):
    path = level / "imgs" / "0" / "sample_0.png"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"0\.npy:1: .*sample_0\.png is missing or empty\. .*delete this line"):
        list(PATHFINDER.read(level / "metadata" / "0.npy"))
    Image.fromarray(np.stack([picture(0)[..., 0], picture(1)[..., 0], picture(2)[..., 0]], axis=-1)).save(path)
    refusal(lambda: PATHFINDER.read(level / "metadata" / "0.npy"), match=r"sample_0\.png: the image is not grey")
    Image.fromarray(np.zeros((128, 128), dtype=np.uint8)).save(path)
    with pytest.raises(DataError, match=r"sample_0\.png: this image has 128×128 pixels, 32×32 are expected"):
        list(PATHFINDER.read(level / "metadata" / "0.npy"))
