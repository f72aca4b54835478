"""WikiHop (Welbl et al. 2018): questions with candidates and paragraphs, in QAngaroo's format, as MedHop's."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megasparse.errors import DataError
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
    `wikihop/`. The line of a location is the number of the example, from 1. For the variant with masked candidates,
    name its files: --source dev.masked.json.

    Longformer (Beltagy et al. 2020) removes spaces before punctuation, shuffles the paragraphs in training, and reads
    paragraphs beyond its length in further windows. Here texts are read unchanged, in order, and truncated.
    """

    name, form, metrics = "wikihop", "choice", ("accuracy",)

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return existing(folder, {"train": "train.json", "validation": "dev.json", "test": "test.json"}, "wikihop")

    def read(self, file: Path) -> Iterator[Example]:
        with DataError.instead_of((ValueError, RecursionError), file, "not JSON ({})", HINT):
            rows = json.loads(whole_text(file).removeprefix("\ufeff"))
        if not isinstance(rows, list):
            raise DataError(file, "not a JSON array of examples", f"Write [EXAMPLE, ...]. {FORM}")
        names: set[str] = set()

        def example(row: Any, location: SourceLocation, number: str) -> Example:
            def wrong(problem: str, hint: str) -> DataError:
                return DataError(location, f"example {location.line}{problem}", hint)

            try:
                question = Question.model_validate(row)
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(map(str, first["loc"])) or "it"
                raise wrong(f": {key}: {first['msg']} ({json.dumps(first['input'])[:80]})", FORM) from None
            candidates, answer, title = question.candidates, question.answer, f' ("{question.id[:80]}"): '
            if twice := [text for text, number in Counter(candidates).items() if number > 1]:
                raise wrong(f'{title}"{twice[0][:80]}" occurs twice among the candidates', "Remove one")
            if answer is not None and answer not in candidates:
                raise wrong(f'{title}the answer "{answer[:80]}" is not among the candidates', "Use one of them")
            if question.id in names:
                raise wrong(f"{title}the id occurs twice", "Use unique ids")
            names.add(question.id)
            label = None if answer is None else candidates.index(answer)
            return Example((question.query, tuple(candidates), tuple(question.supports)), label, location, question.id)

        return examples_of(file, ((SourceLocation(file, line), row) for line, row in enumerate(rows, 1)), example)
