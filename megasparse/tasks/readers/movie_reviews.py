"""Polarity of whole film reviews (Pang and Lee 2004, polarity data set 2.0): 1,000 that praise, 1,000 that do not."""

from collections.abc import Iterator
from pathlib import Path

from megasparse.tasks.readers.rows import whole_text
from megasparse.tasks.task import Example, SourceLocation, Task

FOLDERS = (".", "txt_sentoken", "movie_reviews")
FOLDS = {"train": "[0-7]", "validation": "8", "test": "9"}


class MovieReviews(Task):
    """The official folders neg/ and pos/ (of the authors' archive in txt_sentoken/, of NLTK's in movie_reviews/), a
    review a file, cv000_29416.txt. Their number's first digit is the official fold: the last one is the test split,
    the one before it validation. (The authors test on each fold in turn.)

    A review in a folder of another name has no label.
    """

    name = "movie_reviews"
    metrics = ("accuracy",)
    classes = ("neg", "pos")

    def files(self, folder: Path) -> dict[str, list[Path]]:
        root = next((folder / each for each in FOLDERS if (folder / each / self.classes[0]).is_dir()), folder)
        found = {
            split: [file for name in self.classes for file in sorted((root / name).glob(f"cv{fold}[0-9][0-9]_*.txt"))]
            for split, fold in FOLDS.items()
        }
        return {split: files for split, files in found.items() if files}

    def read(self, file: Path) -> Iterator[Example]:
        text = whole_text(file).removeprefix("\ufeff")
        folder = file.resolve().parent.name
        label = self.classes.index(folder) if folder in self.classes else None
        yield Example((text,), label, SourceLocation(file), file.stem)
