"""PubMed: papers and their abstracts (Cohan et al. 2018)."""

from typing import Any, ClassVar

from megasparse.errors import DataError
from megasparse.tasks.readers.rows import RowTask, field, json_lines
from megasparse.tasks.readers.text_task import ROUGE, TextTask
from megasparse.tasks.task import Example, SourceLocation

BEGIN, END = "<S>", "</S>"
"""Marks around each sentence of an abstract."""


class PubMed(RowTask, TextTask):
    """Papers of PubMed: train.txt, val.txt and test.txt of JSON objects, one a line, in the folder or its
    pubmed-dataset/: `article_id`, `article_text` and `abstract_text`, lists of sentences. A paper's sentences are
    joined by spaces, those of its abstract stand on lines of their own, without their <S> and </S>. A paper without
    `abstract_text` has no label.
    """

    name = "pubmed"
    metrics = ROUGE
    official: ClassVar = {"train": "train.txt", "validation": "val.txt", "test": "test.txt"}
    inner = "pubmed-dataset"
    rows = staticmethod(json_lines)

    def example(self, row: dict[str, Any], location: SourceLocation, number: str) -> Example:
        text, label = " ".join(_sentences(row, "article_text", location)), None
        if "abstract_text" in row:
            abstract = _sentences(row, "abstract_text", location)
            label = "\n".join(each.removeprefix(BEGIN).removesuffix(END).strip() for each in abstract)
        return Example((text,), label, location, str(row.get("article_id", number)))


def _sentences(row: dict[str, Any], column: str, location: SourceLocation) -> list[str]:
    found = field(row, column, location)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise DataError(str(location), f'"{column}" is no list of sentences', "Put it right, or take the official file")
    return [each.strip() for each in found]
