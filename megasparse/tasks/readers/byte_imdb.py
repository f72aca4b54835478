"""Byte-level text classification of Long Range Arena (Tay et al. 2021): film reviews of IMDb (Maas et al. 2011).

Official files: aclImdb/{train,test}/{neg,pos}/*.txt, 12,500 each, one review a file. A review is read as it stands, and
seen as bytes where the model's tokenizer is `bytes`. Tay et al. validate on the test set, as IMDb has no other; that
would choose the checkpoint by the test set, so there is no split `validation` here and a part of `train` is held out.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from megasparse.data.corpora.number_files import natural
from megasparse.errors import DataError
from megasparse.tasks.readers.rows import whole_text
from megasparse.tasks.task import Example, SourceLocation, Task


class ByteIMDb(Task):
    name = "byte_imdb"
    metrics = ("accuracy",)
    classes = ("neg", "pos")
    official: ClassVar = {"train": "train", "test": "test"}

    def read(self, file: Path) -> Iterator[Example]:
        """The reviews of a folder with neg and pos: first neg's, each class by the numbers in the files' names."""
        with self.skipping(file) as skipping:
            for label, name in enumerate(self.classes):
                reviews = sorted((file / name).glob("*.txt"), key=lambda path: natural(path.name))
                if not reviews:
                    raise DataError(file / name, "holds no *.txt", "Give a folder with neg/*.txt and pos/*.txt")
                skipping.rows += len(reviews)
                for review in reviews:
                    with skipping:
                        yield Example((whole_text(review),), label, SourceLocation(review), f"{name}/{review.stem}")
