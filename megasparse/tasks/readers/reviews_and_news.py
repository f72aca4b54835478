"""Classes of single texts (IMDB, film reviews, Amazon's reviews, AG's news, MIND's topics), and MIND's clicks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from megasparse.errors import DataError
from megasparse.tasks.readers.rows import (
    HINT,
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
        first, second = ({split: f"imdb{mark}{name}.txt.ss" for split, name in names.items()} for mark in ".-")
        return existing(folder, first) or existing(folder, second)

    rows = staticmethod(lines)

    def example(self, row: str, location: SourceLocation, number: str) -> Example:
        values = row.split("\t\t", len(FIELDS) - 1)
        review = as_row(FIELDS, values, location, "Put two tabs between them, or take the official file")
        text = " ".join(sentence.strip() for sentence in review["text"].split(SENTENCE_END))
        return Example((text,), self.class_of(review["rating"], location), location, number)


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
        root = next((folder / name for name in POLARITY_FOLDERS if (folder / name / "neg").is_dir()), folder)
        splits = {
            split: [file for name in self.classes for file in sorted((root / name).glob(f"cv{fold}[0-9][0-9]_*.txt"))]
            for split, fold in FOLDS.items()
        }
        return {split: files for split, files in splits.items() if files}

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
        data = whole_bytes(file)
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = data.decode("latin-1")
        *sentences, rest = text.split("\n")  # not splitlines: Latin-1 has one character more that it splits at
        for number, sentence in enumerate([*sentences, rest] if rest else sentences):
            if is_in(part, number):
                yield Example((sentence.removesuffix("\r"),), label, SourceLocation(file, number + 1), str(number))


FILES = ("reviews_Electronics_5.json", "reviews_Electronics_5.json.gz")
STARS = (1, 2, 3, 4, 5)


class Amazon(RowTask):
    """The official reviews_Electronics_5.json or .json.gz, 1,689,188 reviews, one JSON object a line. There are no
    official splits: see tasks/task.py.

    A text is `reviewText` alone, without `summary`, and may be empty (task.empty).
    """

    name = "amazon"
    metrics = ("accuracy", "macro_f1")
    classes = ("1.0", "2.0", "3.0", "4.0", "5.0")
    every = 1
    rows = staticmethod(json_lines)

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return parts_of([folder / FILES[0]]) or parts_of([folder / FILES[1]])

    def example(self, row: dict[str, Any], location: SourceLocation, number: str) -> Example:
        text, stars = field(row, "reviewText", location), field(row, "overall", location)
        if not isinstance(text, str):
            raise DataError(str(location), "reviewText is no text", HINT)
        if type(stars) not in (int, float) or stars not in STARS:
            problem = f"overall is {json.dumps(stars)[:80]}, no number of stars"
            raise DataError(str(location), problem, "Write 1.0, 2.0, 3.0, 4.0 or 5.0")
        return Example((text,), STARS.index(stars), location, str(int(number) * self.every))


class AmazonSample(Amazon):
    """50,000 of these reviews, every 33rd, in parts of 40,000, 5,000 and 5,000: as many as Smart Bird has, whose paper
    does not say which.
    """

    name = "amazon_50k"
    every, most = 33, 50_000

    def rows(self, file: Path, skipping: Skipping) -> Iterator[Any]:  # type: ignore[override]
        for number, row in enumerate(json_lines(file, skipping)):
            if number % self.every == 0 and number < self.every * self.most:
                yield row


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


class MINDTopics(RowTask):
    """The official news.tsv of MINDlarge_train or MINDsmall_train. The official validation and test folders list many
    of the same articles, so the splits are made of this one file: see tasks/task.py.

    An article is its title, a space, and its abstract; where that is empty the title alone. Smart Bird reads the body
    of the article (505 words in the mean), which MIND links to and does not hold, and has more articles (161,000): its
    figures are of another text.
    """

    name = "mind_topics"
    columns = COLUMNS
    metrics = ("accuracy", "macro_f1")
    classes = (
        *("autos", "entertainment", "finance", "foodanddrink", "games", "health", "kids", "lifestyle", "middleeast"),
        *("movies", "music", "news", "northamerica", "sports", "travel", "tv", "video", "weather"),
    )

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return next((parts for name in MIND_FOLDERS if (parts := parts_of([folder / name / NEWS]))), {})

    def example(self, row: dict[str, str], location: SourceLocation, number: str) -> Example:
        text = " ".join(part for part in (row["title"], row["abstract"]) if part)
        return Example((text,), self.class_of(row["category"], location), location, row["id"])


BEHAVIOR_COLUMNS = ("impression id", "user id", "time", "history", "impressions")
NEWS, BEHAVIORS = "news.tsv", "behaviors.tsv"
RELEASES = ("MINDlarge_", "MINDsmall_", "")
FOLDERS = {"train": "train", "validation": "dev", "test": "test"}


class MIND(Task):
    """The official folders MINDlarge_train, MINDlarge_dev and MINDlarge_test, else those of MINDsmall (which has no
    test), else train, dev and test; each has a behaviors.tsv, and beside it the news.tsv that this speaks of.

    An example is one impression. Its inputs are the titles of the news clicked before, the latest
    `task.recommendation.history` of them in the order of the clicks, and those of the news shown; its label says of
    each news shown whether it was clicked, 1 or 0, and is None in the official test set. Equal titles, histories and
    labels are one object in memory.
    """

    name = "mind"
    form = "ranking"
    metrics = ("auc", "mrr", "ndcg5", "ndcg10")
    segments = 2

    def files(self, folder: Path) -> dict[str, list[Path]]:
        for release in RELEASES:
            names = {split: f"{release}{inner}/{BEHAVIORS}" for split, inner in FOLDERS.items()}
            if files := existing(folder, names):
                return files
        return {}

    def read(self, file: Path) -> Iterator[Example]:
        """Read the impressions of a behaviors.tsv.

        Malformed are also a news id that the news.tsv in the same folder lacks, a label other than 0 and 1, and a
        labelled impression without a click, or with clicks only, for which no metric is defined.
        """
        titles = self._titles(file.with_name(NEWS))
        cache: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        last = self.config.recommendation.history

        def titles_of(names: list[str], location: SourceLocation) -> tuple[str, ...]:
            for name in names:
                if name not in titles:
                    hint = "Put it right, or take both files from one official folder"
                    raise DataError(str(location), f'"{name[:80]}" is no news of {file.with_name(NEWS)}', hint)
            return tuple(titles[name] for name in names)

        with self.skipping(file) as skipping:
            for location, row in tab_separated(file, BEHAVIOR_COLUMNS, skipping):
                with skipping:
                    clicked = titles_of(row["history"].split(), location)[-last:]
                    names, label = _shown(row["impressions"].split(), location)
                    inputs: Any = (cache.setdefault(clicked, clicked), titles_of(names, location))
                    label = None if label is None else cache.setdefault(label, label)
                    yield Example(inputs, label, location, row["impression id"])

    def _titles(self, file: Path) -> dict[str, str]:
        """Return the titles of a news.tsv, by news id."""
        titles: dict[str, str] = {}
        cache: dict[str, str] = {}
        with self.skipping(file) as skipping:
            for location, row in tab_separated(file, COLUMNS, skipping):
                with skipping:
                    name, title = row["id"], row["title"]
                    if not title.strip() and self.config.empty == "refuse":
                        hint = 'Give it one, or keep such news, which are counted: --set task.empty="keep"'
                        raise DataError(str(location), f'the title of "{name[:80]}" is empty', hint)
                    if name in titles:
                        raise DataError(str(location), f'"{name[:80]}" stands there twice', "Remove one of them")
                    titles[name] = cache.setdefault(title, title)
        return titles


def _shown(fields: list[str], location: SourceLocation) -> tuple[list[str], tuple[int, ...] | None]:
    """Return the ids of `N1-0 N2-1`, and the labels; `N1 N2` has none (None)."""
    if not fields:
        raise DataError(str(location), "an impression without any news", "Remove it, or take the official file")
    if not any("-" in entry for entry in fields):
        return fields, None
    split = [entry.rpartition("-") for entry in fields]
    for entry, (name, _, label) in zip(fields, split, strict=True):
        if not name or label not in ("0", "1"):
            hint = "Write N1-1 of a news that was clicked, N1-0 of another one; in a test set N1 of each"
            raise DataError(str(location), f'"{entry[:80]}" has no label 0 or 1', hint)
    labels = tuple(int(label) for _, _, label in split)
    if len(set(labels)) == 1:
        problem = "a click on every news shown" if labels[0] else "no click on any news shown"
        raise DataError(str(location), f"{problem}: there is nothing to rank", "Remove the impression")
    return [name for name, _, _ in split], labels
