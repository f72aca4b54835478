import numpy as np
import pytest
from PIL import Image

from megasparse.errors import DataError
from megasparse.tasks.task import split_files

SETTINGS = "1.0 14 4 2 0.5 1 1"
LEVEL = "curv_contour_length_14"


def picture(seed: int) -> np.ndarray:
    """Random picture, uint8 (32, 32)."""
    return np.random.default_rng(seed).integers(0, 256, (32, 32), dtype=np.uint8)


@pytest.fixture
def level(tmp_path):
    """A level as lra_release has it: 12 metadata files with two images each, label 1 where their numbers are even."""
    folder = tmp_path / "pathfinder32" / LEVEL
    (folder / "metadata").mkdir(parents=True)
    for number in range(12):
        (folder / "imgs" / str(number)).mkdir(parents=True)
        rows = []
        for sample in range(2):
            Image.fromarray(picture(2 * number + sample)).save(folder / "imgs" / str(number) / f"sample_{sample}.png")
            rows.append(f"imgs/{number} sample_{sample}.png {sample} {(number + sample + 1) % 2} {SETTINGS}\n")
        (folder / "metadata" / f"{number}.npy").write_text("".join(rows))
    return folder


def test_images_and_labels_are_those_of_the_metadata(task, level):
    first, second = task.read(level / "metadata" / "3.npy")
    assert first.inputs[0].tolist() == picture(6).reshape(-1).tolist() and first.inputs[0].dtype == np.int64
    assert second.inputs[0].tolist() == picture(7).reshape(-1).tolist()
    assert (first.label, second.label) == (0, 1) and task.vocabulary == 256 and task.classes == ("0", "1")
    assert (first.name, str(second.location)) == ("imgs/3/sample_0.png", f"{level}/metadata/3.npy:2")


def test_the_splits_are_the_first_and_last_tenths_in_the_order_of_the_numbers(task, level):
    numbers = {split: [int(path.stem) for path in files] for split, files in task.files(level).items()}
    assert numbers == {"train": list(range(9)), "validation": [9], "test": [10, 11]}
    labels = [example.label for file in split_files(task, level, "test") for example in task.read(file)]
    assert labels == [1, 0, 0, 1]


def test_arrays_are_not_read(task, tmp_path):
    path = tmp_path / "0.npy"
    np.save(path, np.array([["imgs/0", "sample_0.png"]], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"0\.npy: this is a numpy array, which can hold pickles.*text"):
        list(task.read(path))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("../../secret sample_0.png 0 1", r'0\.npy:1: "\.\./\.\./secret sample_0\.png 0 1" is no line of metadata'),
        ("imgs/0 ../sample_0.png 0 1", r"0\.npy:1: .* is no line of metadata. Write: imgs/0 sample_7\.png 7 1"),
        ("imgs/0 sample_0.png 0", r"0\.npy:1: .* is no line of metadata"),
        ("", r'0\.npy:1: "" is no line of metadata'),
        ("imgs/0 sample_0.png 0 2", r'0\.npy:1: "2" is no label of pathfinder'),
        ("imgs/0 sample_99.png 99 1", r"0\.npy:1: .*imgs/0/sample_99\.png is not there"),
    ],
)
def test_lines_that_name_no_image_are_named(task, level, row, said):
    (level / "metadata" / "0.npy").write_text(f"{row}\n")
    with pytest.raises(DataError, match=said):
        list(task.read(level / "metadata" / "0.npy"))


def test_images_that_do_not_fit_are_named(task, level):
    path = level / "imgs" / "0" / "sample_0.png"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"0\.npy:1: .*sample_0\.png is empty\. Delete this line"):
        list(task.read(level / "metadata" / "0.npy"))
    Image.fromarray(np.stack([picture(0), picture(1), picture(2)], axis=-1)).save(path)
    with pytest.raises(DataError, match=r"sample_0\.png: this image has colours, grey is expected"):
        list(task.read(level / "metadata" / "0.npy"))
    Image.fromarray(np.zeros((128, 128), dtype=np.uint8)).save(path)
    with pytest.raises(DataError, match=r"sample_0\.png: this image has 128×128 pixels, 32×32 are expected"):
        list(task.read(level / "metadata" / "0.npy"))
