"""Clicks on news: MIND (Wu et al. 2020)."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasparse.errors import DataError
from megasparse.tasks.readers.rows import tab_separated
from megasparse.tasks.task import Example, SourceLocation, Task, examples_of, existing

NEWS_COLUMNS = ("id", "category", "subcategory", "title", "abstract", "url", "title entities", "abstract entities")
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

        def example(row: dict[str, str], location: SourceLocation, number: str) -> Example:
            clicked = titles_of(row["history"].split(), location)[-last:]
            names, label = _shown(row["impressions"].split(), location)
            inputs: Any = (cache.setdefault(clicked, clicked), titles_of(names, location))
            return Example(inputs, cache.setdefault(label, label) if label else None, location, row["impression id"])

        return examples_of(file, tab_separated(file, BEHAVIOR_COLUMNS), example)

    def _titles(self, file: Path) -> dict[str, str]:
        """Return the titles of a news.tsv, by news id."""
        titles: dict[str, str] = {}
        cache: dict[str, str] = {}

        def example(row: dict[str, str], location: SourceLocation, number: str) -> Example:
            name, title = row["id"], row["title"]
            if not title.strip() and self.config.empty == "refuse":
                hint = 'Give it one, or keep such news, which are counted: --set task.empty="keep"'
                raise DataError(str(location), f'the title of "{name[:80]}" is empty', hint)
            if name in titles:
                raise DataError(str(location), f'"{name[:80]}" stands there twice', "Remove one of them")
            titles[name] = cache.setdefault(title, title)
            return Example((title,), None, location, name)

        deque(examples_of(file, tab_separated(file, NEWS_COLUMNS), example), maxlen=0)
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
