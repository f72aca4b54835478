"""ListOps of Long Range Arena (Nangia & Bowman 2018; Tay et al. 2021): the value of a nested operation on digits.

Official files: basic_train.tsv, basic_val.tsv and basic_test.tsv, which megasparse listops makes, with the columns
Source, such as `( ( ( [MAX 2 ) 9 ) ] )`, and Target. The parentheses, which only repeat what the brackets say, are left
out: what remains is 0–9, [MIN, [MAX, [MED, [SM and ], at most 1,999 tokens, as Tay et al. describe the task. Their
published input pipeline also lost every bracket; its authors called that an error (the value depends on them).
"""

from typing import ClassVar

import numpy as np

from megasparse.errors import DataError
from megasparse.tasks.readers.rows import RowTask, field
from megasparse.tasks.task import Example, SourceLocation

DIGITS = tuple("0123456789")
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
END = "]"
TOKENS = (*DIGITS, *OPERATORS, END)
"""Tokens by id."""
IDS = {token: number for number, token in enumerate(TOKENS)}
PARENTHESES = ("(", ")")


class ListOps(RowTask):
    name = "listops"
    metrics = ("accuracy",)
    vocabulary = len(TOKENS)
    classes = DIGITS
    official: ClassVar = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}

    def example(self, row: dict[str, str], location: SourceLocation, number: str) -> Example:
        source, target = field(row, "Source", location), field(row, "Target", location)
        return Example((_ids(source, location),), self.class_of(target, location), location, number)


def _ids(source: str, location: SourceLocation) -> np.ndarray:
    tokens = [token for token in source.split() if token not in PARENTHESES]
    try:
        return np.array([IDS[token] for token in tokens], dtype=np.int64)
    except KeyError as error:
        problem = f'Source has "{error.args[0][:80]}", which is no token of ListOps'
        raise DataError(str(location), problem, f"Its tokens are: ( ) {' '.join(TOKENS)}") from None
