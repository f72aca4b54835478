"""WikiHop (Welbl et al. 2018): which of a question's candidates follows from several paragraphs of Wikipedia; as
QAngaroo publishes it, whose MedHop has files of the same form.
"""

import json
from collections.abc import Iterator
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
    """Questions of WikiHop: train.json and dev.json, and test.json where there is one: `source` is their folder, or one
    that has them in `wikihop/`. A location's line is the number of the example in its file, from 1. The variant whose
    candidates are masked is read by its files' names: --source dev.masked.json.

    Longformer (Beltagy et al. 2020) rids texts of the spaces before punctuation, shuffles the paragraphs in training,
    and reads those beyond its length in further windows, each beside the candidates, whose logits it adds. Here texts
    stand as they are in the files, in their order, and what is beyond `task.max_length` is cut.
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
            raise DataError(file, f"is no JSON ({error})", HINT) from None
        if not isinstance(rows, list):
            raise DataError(file, "is no JSON array of examples", f"Write [EXAMPLE, ...]. {FORM}")

        def convert(row: Any, location: SourceLocation, number: str) -> Choice:
            example = _example(row, location)
            if example.name in names:
                problem = f'example {location.line}: the id "{example.name[:80]}" is another example\'s too'
                raise DataError(str(location), problem, "Give each an id of its own")
            names.add(example.name)
            return example

        numbered = ((SourceLocation(file, number), row) for number, row in enumerate(rows, 1))
        return examples_of(file, numbered, convert)


def _example(row: Any, location: SourceLocation) -> Choice:
    """Return the example of one object. Raises DataError naming file, number and key if it is malformed."""
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
        raise DataError(str(location), f'{title}: "{twice[:80]}" is twice among the candidates', "Remove one")
    if answer is not None and answer not in candidates:
        hint = f"Its candidates are: {', '.join(candidates)[:200]}. Without an answer leave the key out"
        raise DataError(str(location), f'{title}: the answer "{answer[:80]}" is not among the candidates', hint)
    label = None if answer is None else candidates.index(answer)
    return Choice((question.query, *candidates, *question.supports), label, location, question.id, len(candidates))
