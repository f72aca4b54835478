"""Classes of single texts: IMDB, film reviews, Amazon's reviews, AG's news, MIND's topics."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from megasparse.errors import DataError
from megasparse.tasks.readers.rows import (
    RowTask,
    as_row,
    comma_separated,
    field,
    json_lines,
    lines,
    tab_separated,
    whole_bytes,
    whole_text,
)
from megasparse.tasks.task import Example, Skipping, SourceLocation, Task, existing, is_in, parts_of, split_name

FIELDS = ("user", "product", "rating", "text")
SENTENCE_END = "<sssss>"


class IMDB(RowTask):
    """The files with splits that others made of these reviews: imdb.train.txt.ss, imdb.dev.txt.ss and imdb.test.txt.ss
    (67,426, 8,381 and 9,112 reviews; Tang, Qin and Liu, ACL 2015), or imdb-train.txt.ss and so on (their EMNLP 2015
    paper, 348,415 reviews). Smart Bird's 108,500, 13,600 and 13,600 are neither, but JMARS' own 135,669 reviews (Diao
    et al. 2014), split 8 : 1 : 1.

    Rows are user, product, rating and text, with two tabs between them. The mark between two sentences of a text,
    ` <sssss> `, becomes a space.
    """

    name = "imdb"
    metrics = ("accuracy", "macro_f1")
    classes = tuple(map(str, range(1, 11)))

    def files(self, folder: Path) -> dict[str, list[Path]]:
        names = {"train": "train", "validation": "dev", "test": "test"}
        released = ({split: f"imdb{mark}{name}.txt.ss" for split, name in names.items()} for mark in ".-")
        return next((found for each in released if (found := existing(folder, each))), {})

    rows = staticmethod(lines)

    def example(self, row: str, location: SourceLocation, number: str) -> Example:
        values = row.split("\t\t", len(FIELDS) - 1)
        found = as_row(FIELDS, values, location, "Put two tabs between them, or take the official file")
        text = " ".join(sentence.strip() for sentence in found["text"].split(SENTENCE_END))
        return Example((text,), self.class_of(found["rating"], location), location, number)


POLARITY_FOLDERS = (".", "txt_sentoken", "movie_reviews")
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
        root = next((folder / each for each in POLARITY_FOLDERS if (folder / each / self.classes[0]).is_dir()), folder)
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


class SentencePolarity(Task):
    """The official rt-polarity.neg and rt-polarity.pos, a sentence a line. There are no official splits: see
    tasks/task.py.

    The authors' files are Latin-1, the ones that NLTK ships UTF-8: a file that is no UTF-8 is read as Latin-1. What
    another file has (its name ends neither in .neg nor in .pos) is sentences without labels.
    """

    name = "sentence_polarity"
    metrics = ("accuracy",)
    classes = ("neg", "pos")

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return parts_of([folder / f"rt-polarity.{name}" for name in self.classes])

    def read(self, file: Path) -> Iterator[Example]:
        file, part = split_name(file)
        name = file.suffix.removeprefix(".")
        label = self.classes.index(name) if name in self.classes else None
        *sentences, rest = _text(file).split("\n")  # not splitlines: Latin-1 has one character more that it splits at
        for number, sentence in enumerate([*sentences, rest] if rest else sentences):
            if is_in(part, number):
                yield Example((sentence.removesuffix("\r"),), label, SourceLocation(file, number + 1), str(number))


def _text(file: Path) -> str:
    data = whole_bytes(file)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


FILES = ("reviews_Electronics_5.json", "reviews_Electronics_5.json.gz")
STARS = (1, 2, 3, 4, 5)


class Amazon(Task):
    """The official reviews_Electronics_5.json or .json.gz, 1,689,188 reviews, one JSON object a line. There are no
    official splits: see tasks/task.py.

    A text is `reviewText` alone, without `summary`, and may be empty (task.empty).
    """

    name = "amazon"
    metrics = ("accuracy", "macro_f1")
    classes = ("1.0", "2.0", "3.0", "4.0", "5.0")
    every, most = 1, sys.maxsize
    """Of all reviews every so many-th is an example, up to so many of them."""

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return next((found for name in FILES if (found := parts_of([folder / name]))), {})

    def read(self, file: Path) -> Iterator[Example]:
        file, part = split_name(file)
        with self.skipping(file) as skipping:
            for number, (location, row) in enumerate(json_lines(file, skipping)):
                place, left = divmod(number, self.every)
                with skipping:
                    if not left and place < self.most and is_in(part, place):
                        yield _review(row, location, number)


class AmazonSample(Amazon):
    """50,000 of these reviews, every 33rd, in parts of 40,000, 5,000 and 5,000: as many as Smart Bird has, whose paper
    does not say which.
    """

    name = "amazon_50k"
    every, most = 33, 50_000


def _review(row: dict[str, Any], location: SourceLocation, number: int) -> Example:
    text, stars = field(row, "reviewText", location), field(row, "overall", location)
    if not isinstance(text, str):
        raise DataError(str(location), "reviewText is no text", "Put it right, or take the official file")
    if type(stars) not in (int, float) or stars not in STARS:
        problem = f"overall is {json.dumps(stars)[:80]}, no number of stars"
        raise DataError(str(location), problem, "Write 1.0, 2.0, 3.0, 4.0 or 5.0")
    return Example((text,), STARS.index(stars), location, str(number))


class AGNews(RowTask):
    """The official train.csv and test.csv, without a header. There is no official validation split: a tenth of the
    training articles held out leaves 108,000, as Smart Bird has it.

    An article is its title, a space, and its description, each as it stands: line ends of the source are a backslash
    there, and some HTML entities are left (`#39;`).
    """

    name = "ag_news"
    metrics = ("accuracy", "macro_f1")
    classes = ("World", "Sports", "Business", "Sci/Tech")
    official: ClassVar = {"train": "train.csv", "test": "test.csv"}

    def rows(self, file: Path, skipping: Skipping) -> Iterator[tuple[SourceLocation, dict[str, str]]]:
        return comma_separated(file, ("class index", "title", "description"), skipping)

    def example(self, row: dict[str, str], location: SourceLocation, number: str) -> Example:
        index, indices = row["class index"], ("1", "2", "3", "4")
        if index not in indices:
            hint = "Write 1 (World), 2 (Sports), 3 (Business) or 4 (Sci/Tech)"
            raise DataError(str(location), f'"{index[:80]}" is no class index of ag_news', hint)
        return Example((f"{row['title']} {row['description']}",), indices.index(index), location, number)


COLUMNS = ("id", "category", "subcategory", "title", "abstract", "url", "title entities", "abstract entities")
MIND_FOLDERS = ("MINDlarge_train", "MINDsmall_train", ".")


class MINDTopics(Task):
    """The official news.tsv of MINDlarge_train or MINDsmall_train. The official validation and test folders list many
    of the same articles, so the splits are made of this one file: see tasks/task.py.

    An article is its title, a space, and its abstract; where that is empty the title alone. Smart Bird reads the body
    of the article (505 words in the mean), which MIND links to and does not hold, and has more articles (161,000): its
    figures are of another text.
    """

    name = "mind_topics"
    metrics = ("accuracy", "macro_f1")
    classes = (
        *("autos", "entertainment", "finance", "foodanddrink", "games", "health", "kids", "lifestyle", "middleeast"),
        *("movies", "music", "news", "northamerica", "sports", "travel", "tv", "video", "weather"),
    )

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return next((found for name in MIND_FOLDERS if (found := parts_of([folder / name / "news.tsv"]))), {})

    def read(self, file: Path) -> Iterator[Example]:
        file, part = split_name(file)
        with self.skipping(file) as skipping:
            for number, (location, row) in enumerate(tab_separated(file, COLUMNS, skipping)):
                with skipping:
                    if is_in(part, number):
                        text = " ".join(part for part in (row["title"], row["abstract"]) if part)
                        yield Example((text,), self.class_of(row["category"], location), location, row["id"])
