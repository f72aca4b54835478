"""AG's news (Zhang et al. 2015): which of four topics a short article has. 120,000 training and 7,600 test articles."""

from collections.abc import Iterator
from pathlib import Path

from megasparse.errors import DataError
from megasparse.tasks.readers.rows import comma_separated
from megasparse.tasks.task import Example, Task, existing

COLUMNS = ("class index", "title", "description")


class AGNews(Task):
    """The official train.csv and test.csv, without a header. There is no official validation split: a tenth of the
    training articles held out leaves 108,000, as Smart Bird has it.

    An article is its title, a space, and its description, each as it stands: line ends of the source are a backslash
    there, and some HTML entities are left (`#39;`).
    """

    name = "ag_news"
    metrics = ("accuracy", "macro_f1")
    classes = ("World", "Sports", "Business", "Sci/Tech")

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return existing(folder, {"train": "train.csv", "test": "test.csv"})

    def read(self, file: Path) -> Iterator[Example]:
        indices = [str(number + 1) for number in range(len(self.classes))]
        hint = "Write 1 (World), 2 (Sports), 3 (Business) or 4 (Sci/Tech)"
        with self.skipping(file) as skipping:
            for number, (location, row) in enumerate(comma_separated(file, COLUMNS, skipping)):
                with skipping:
                    index = row["class index"]
                    if index not in indices:
                        raise DataError(str(location), f'"{index[:80]}" is no class index of ag_news', hint)
                    text = f"{row['title']} {row['description']}"
                    yield Example((text,), indices.index(index), location, str(number))
