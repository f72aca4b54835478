import pytest

from megasparse.errors import DataError
from megasparse.tasks.task import split_files

REVIEWS = {
    "neg/0_3.txt": b"Dull.<br /><br />Not \xe2\x80\x93 good",
    "neg/2_1.txt": b"\xef\xbb\xbfmarked\r\nbad\n",
    "neg/10_2.txt": b"\tworst ",
    "pos/0_9.txt": b"Fine",
}


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "test"):
        for name, content in REVIEWS.items():
            path = tmp_path / "aclImdb" / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    (tmp_path / "aclImdb" / "train" / "unsup").mkdir()
    (tmp_path / "aclImdb" / "train" / "unsup" / "0_0.txt").write_text("without a label")
    return tmp_path / "aclImdb"


def test_reviews_come_class_by_class_in_the_order_of_their_numbers(task, folder):
    examples = list(task.read(*split_files(task, folder, "train")))
    assert [example.name for example in examples] == ["neg/0_3", "neg/2_1", "neg/10_2", "pos/0_9"]
    assert [example.label for example in examples] == [0, 0, 0, 1] and task.classes == ("neg", "pos")
    assert [str(example.location) for example in examples] == [str(folder / "train" / name) for name in REVIEWS]


def test_a_class_without_reviews_is_named(task, folder):
    (folder / "train" / "pos" / "0_9.txt").rename(folder / "train" / "pos" / "0_9.text")
    with pytest.raises(DataError, match=r"train/pos: holds no \*\.txt\. Give a folder with neg/\*\.txt and pos"):
        list(task.read(folder / "train"))
