"""IMDB's ratings (Diao et al. 2014): which of ten ratings a long film review goes with."""

from pathlib import Path

from megasparse.tasks.readers.rows import RowTask, as_row, lines
from megasparse.tasks.task import Example, SourceLocation, existing

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
