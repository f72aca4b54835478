"""The STS benchmark as its authors publish it (Cer et al. 2017): sts-train.csv, sts-dev.csv and sts-test.csv, with the
test labels that GLUE's STS-B keeps to itself. Fields are separated by tabs, despite the files' names, and a quotation
mark is an ordinary character.
"""

import math
from typing import ClassVar

from megasparse.errors import DataError
from megasparse.tasks.readers.rows import RowTask, lines
from megasparse.tasks.task import Example, SourceLocation

COLUMNS = ("genre", "file", "year", "old_index", "score", "sentence1", "sentence2")
"""Rows of some genres have two more: the source of each sentence, with its licence."""
MOST_ALIKE = 5.0


class STSBenchmark(RowTask):
    """How alike two sentences are, from 0 to 5. `source`: the folder of the three files, or the one that holds it."""

    name = "sts_benchmark"
    metrics = ("pearson", "spearman")
    segments = 2
    official: ClassVar = {"train": "sts-train.csv", "validation": "sts-dev.csv", "test": "sts-test.csv"}
    inner = "stsbenchmark"
    rows = staticmethod(lines)

    def example(self, row: str, location: SourceLocation, number: str) -> Example:
        fields = row.split("\t")
        if len(fields) not in (7, 9):
            problem = f"{len(fields)} fields where there are 7 ({', '.join(COLUMNS)}), or 9 with licences"
            raise DataError(str(location), problem, "Put it right, or take the official file")
        score, first, second = fields[4:7]
        return Example((first, second), similarity(score, location), location, number)


def similarity(text: str, location: SourceLocation) -> float:
    """A label from 0 to 5, as a number. Raises DataError naming the location for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= MOST_ALIKE:
        raise DataError(str(location), f'"{text[:80]}" is no similarity from 0 to 5', "Put it right")
    return value
