"""Topics of MIND's news (Wu et al. 2020): which of 18 categories an article has."""

from collections.abc import Iterator
from pathlib import Path

from megasparse.tasks.readers.parts import is_in, parts_of, split_name
from megasparse.tasks.readers.rows import tab_separated
from megasparse.tasks.task import Example, Task

COLUMNS = ("id", "category", "subcategory", "title", "abstract", "url", "title entities", "abstract entities")
FOLDERS = ("MINDlarge_train", "MINDsmall_train", ".")


class MINDTopics(Task):
    """The official news.tsv of MINDlarge_train or MINDsmall_train. The official validation and test folders list many
    of the same articles, so the splits are made of this one file: see readers/parts.py.

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
        return next((found for name in FOLDERS if (found := parts_of([folder / name / "news.tsv"]))), {})

    def read(self, file: Path) -> Iterator[Example]:
        file, part = split_name(file)
        with self.skipping(file) as skipping:
            for number, (location, row) in enumerate(tab_separated(file, COLUMNS, skipping)):
                with skipping:
                    if is_in(part, number):
                        text = " ".join(part for part in (row["title"], row["abstract"]) if part)
                        yield Example((text,), self.class_of(row["category"], location), location, row["id"])
