"""WikiHop (Welbl et al. 2018): questions with candidates and paragraphs, in QAngaroo's format, as MedHop's."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megasparse.errors import DataError
from megasparse.tasks.forms.labels import Choice
from megasparse.tasks.readers.rows import HINT, whole_text
from megasparse.tasks.task import Example, SourceLocation, Task, examples_of, existing

FORM = (
    'An example is {"id": "...", "query": "...", "answer": "...", "candidates": ["...", ...], "supports": ["...", ...]}'
)
Text = Annotated[str, Field(pattern=r"\S")]


class Question(BaseModel):
    model_config = ConfigDict(strict=True)

    id: Text
    query: Text
    candidates: Annotated[list[Text], Field(min_length=1)]
    supports: list[str]
    answer: str | None = None


class WikiHop(Task):
    """Questions of WikiHop: train.json, dev.json and optionally test.json in the `source` folder, or in its subfolder
    `wikihop/`. The line of a location is the number of the example in its file, from 1. For the variant with masked
    candidates, name its files: --source dev.masked.json.

    Longformer (Beltagy et al. 2020) removes spaces before punctuation, shuffles the paragraphs in training, and reads
    paragraphs beyond its length in further windows, each with the candidates, whose logits it adds. Here texts are read
    unchanged, in order, and truncated to `task.max_length`.
    """

    name = "wikihop"
    form = "choice"
    metrics = ("accuracy",)

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return existing(folder, {"train": "train.json", "validation": "dev.json", "test": "test.json"}, "wikihop")

    def read(self, file: Path) -> Iterator[Example]:
        names: set[str] = set()
        try:
            rows = json.loads(whole_text(file).removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise DataError(file, f"not JSON ({error})", HINT) from None
        if not isinstance(rows, list):
            raise DataError(file, "not a JSON array of examples", f"Write [EXAMPLE, ...]. {FORM}")

        numbered = ((SourceLocation(file, number), row) for number, row in enumerate(rows, 1))
        return examples_of(file, numbered, partial(_example, names))


def _example(names: set[str], row: Any, location: SourceLocation, number: str) -> Choice:
    """Convert an object to an example. names: earlier ids. Raises DataError naming file, number and key."""
    try:
        question = Question.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "it"
        problem = f"example {location.line}: {key}: {first['msg']} ({json.dumps(first['input'])[:80]})"
        raise DataError(str(location), problem, FORM) from None
    candidates, answer = question.candidates, question.answer
    title = f'example {location.line} ("{question.id[:80]}")'
    if len(set(candidates)) < len(candidates):
        twice = next(text for text in candidates if candidates.count(text) > 1)
        raise DataError(str(location), f'{title}: "{twice[:80]}" occurs twice among the candidates', "Remove one")
    if answer is not None and answer not in candidates:
        hint = f"Its candidates are: {', '.join(candidates)[:200]}. Without an answer omit the key"
        raise DataError(str(location), f'{title}: the answer "{answer[:80]}" is not among the candidates', hint)
    if question.id in names:
        raise DataError(str(location), f"{title}: the id occurs twice", "Use unique ids")
    names.add(question.id)
    label = None if answer is None else candidates.index(answer)
    return Choice((question.query, *candidates, *question.supports), label, location, question.id, len(candidates))
