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


class MIND(Task):
    """The official folders MINDlarge_train, MINDlarge_dev and MINDlarge_test, else MINDsmall's (without a test set),
    else train, dev and test. Each contains behaviors.tsv and the news.tsv that it refers to.

    An example is an impression. Its inputs are the titles of the latest `task.recommendation.history` news clicked
    before, and of the news shown. Its label marks each news shown as clicked, 1, or not, 0; it is None in the official
    test set. Equal titles, histories and labels are one object in memory.
    """

    name, form, metrics, segments = "mind", "ranking", ("auc", "mrr", "ndcg5", "ndcg10"), 2

    def files(self, folder: Path) -> dict[str, list[Path]]:
        folders = {"train": "train", "validation": "dev", "test": "test"}
        releases = ({split: f"{release}{inner}/{BEHAVIORS}" for split, inner in folders.items()}
                    for release in ("MINDlarge_", "MINDsmall_", ""))  # fmt: skip
        return next((files for names in releases if (files := existing(folder, names))), {})

    def read(self, file: Path) -> Iterator[Example]:
        """Read the impressions of a behaviors.tsv.

        Rows are also malformed if a news id is not in the news.tsv of the same folder, or a labelled impression
        contains no click, or only clicks, for which the metrics are undefined.
        """
        titles = self._titles(file.with_name(NEWS))
        cache: dict[tuple[Any, ...], tuple[Any, ...]] = {}

        def titles_of(names: list[str], location: SourceLocation) -> tuple[str, ...]:
            if lost := [name for name in names if name not in titles]:
                hint = "Correct it, or use both files of one official folder"
                raise DataError(location, f'"{lost[0][:80]}" is not in {file.with_name(NEWS)}', hint)
            return tuple(titles[name] for name in names)

        def example(row: dict[str, str], location: SourceLocation, number: str) -> Example:
            clicked = titles_of(row["history"].split(), location)[-self.config.recommendation.history :]
            names, label = _shown(row["impressions"].split(), location)
            inputs = (cache.setdefault(clicked, clicked), titles_of(names, location))
            return Example(inputs, cache.setdefault(label, label) if label else None, location, row["impression id"])

        return examples_of(file, tab_separated(file, BEHAVIOR_COLUMNS), example)

    def _titles(self, file: Path) -> dict[str, str]:
        titles: dict[str, str] = {}
        cache: dict[str, str] = {}

        def add(row: dict[str, str], location: SourceLocation, number: str) -> None:
            name, title = row["id"], row["title"]
            if not title.strip() and self.config.empty == "refuse":
                raise DataError(location, f'the title of "{name[:80]}" is empty', 'Add one, or set task.empty="keep"')
            if name in titles:
                raise DataError(location, f'"{name[:80]}" occurs twice', "Remove one of them")
            titles[name] = cache.setdefault(title, title)

        deque(examples_of(file, tab_separated(file, NEWS_COLUMNS), add), maxlen=0)
        return titles


def _shown(fields: list[str], location: SourceLocation) -> tuple[list[str], tuple[int, ...] | None]:
    """Parse `N1-0 N2-1` to ids and labels; the labels of `N1 N2` are None."""
    if not fields:
        raise DataError(location, "an impression without any news", "Remove it, or use the official file")
    if not any("-" in entry for entry in fields):
        return fields, None
    split = [entry.rpartition("-") for entry in fields]
    for entry, (name, _, label) in zip(fields, split, strict=True):
        if not name or label not in ("0", "1"):
            raise DataError(location, f'the label of "{entry[:80]}" is not 0 or 1', "Write N1-1 or N1-0")
    labels = tuple(int(label) for _, _, label in split)
    if len(set(labels)) == 1:
        problem = "a click on every news shown" if labels[0] else "no click on any news shown"
        raise DataError(location, f"{problem}: no metric is defined", "Remove the impression")
    return [name for name, _, _ in split], labels
