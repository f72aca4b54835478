"""Amazon's reviews of electronics (He and McAuley 2016): how many stars the reviewer gave."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasparse.errors import DataError
from megasparse.tasks.readers.parts import is_in, parts_of, split_name
from megasparse.tasks.readers.rows import field, json_lines
from megasparse.tasks.task import Example, SourceLocation, Task

FILES = ("reviews_Electronics_5.json", "reviews_Electronics_5.json.gz")
STARS = (1, 2, 3, 4, 5)


class Amazon(Task):
    """The official reviews_Electronics_5.json or .json.gz, 1,689,188 reviews, one JSON object a line. There are no
    official splits: see readers/parts.py.

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
