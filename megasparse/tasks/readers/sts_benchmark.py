"""The STS benchmark as its authors publish it (Cer et al. 2017): sts-train.csv, sts-dev.csv and sts-test.csv, with the
test labels that GLUE's STS-B keeps to itself. Fields are separated by tabs, despite the files' names, and a quotation
mark is an ordinary character.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from megasparse.errors import DataError
from megasparse.tasks.readers.rows import lines
from megasparse.tasks.task import Example, SourceLocation, Task, existing

COLUMNS = ("genre", "file", "year", "old_index", "score", "sentence1", "sentence2")
LICENCE = ("source1", "source2")
"""Columns that rows of some genres have besides: the source of each sentence, with its licence."""
MOST_ALIKE = 5.0


class STSBenchmark(Task):
    """How alike two sentences are, from 0 to 5. `source`: the folder of the three files, or the one that holds it."""

    name = "sts_benchmark"
    metrics = ("pearson", "spearman")
    segments = 2

    def files(self, folder: Path) -> dict[str, list[Path]]:
        names = {"train": "sts-train.csv", "validation": "sts-dev.csv", "test": "sts-test.csv"}
        return existing(folder, names, "stsbenchmark")

    def read(self, file: Path) -> Iterator[Example]:
        counts = (len(COLUMNS), len(COLUMNS) + len(LICENCE))
        with self.skipping(file) as skipping:
            for number, (location, line) in enumerate(lines(file, skipping)):
                with skipping:
                    fields = line.split("\t")
                    if len(fields) not in counts:
                        problem = f"{len(fields)} fields where there are 7 ({', '.join(COLUMNS)}), or 9 with licences"
                        raise DataError(str(location), problem, "Put it right, or take the official file")
                    row = dict(zip((*COLUMNS, *LICENCE), fields, strict=False))
                    label = similarity(row["score"], location)
                    yield Example((row["sentence1"], row["sentence2"]), label, location, str(number))


def similarity(text: str, location: SourceLocation) -> float:
    """A label from 0 to 5, as a number. Raises DataError naming the location for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= MOST_ALIKE:
        raise DataError(str(location), f'"{text[:80]}" is no similarity from 0 to 5', "Put it right")
    return value
