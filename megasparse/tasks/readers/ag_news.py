"""AG's news (Zhang et al. 2015): which of four topics a short article has. 120,000 training and 7,600 test articles."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from megasparse.errors import DataError
from megasparse.tasks.readers.rows import RowTask, comma_separated
from megasparse.tasks.skipping import Skipping
from megasparse.tasks.task import Example, SourceLocation


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
