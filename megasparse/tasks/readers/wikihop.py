"""WikiHop (Welbl et al. 2018): which of a question's candidates follows from several paragraphs of Wikipedia; as
QAngaroo publishes it, whose MedHop has files of the same form.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from megasparse.errors import DataError
from megasparse.tasks.forms.labels import Choice
from megasparse.tasks.readers.rows import HINT, whole_text
from megasparse.tasks.task import Example, SourceLocation, Task, examples_of

KEYS: dict[str, type] = {"id": str, "query": str, "candidates": list, "supports": list}
"""Keys of an example, with the kind of their values; a known `answer`, a text, comes in addition."""
FORM = (
    'An example is {"id": "...", "query": "...", "answer": "...", "candidates": ["...", ...], "supports": ["...", ...]}'
)


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
    official: ClassVar = {"train": "train.json", "validation": "dev.json", "test": "test.json"}
    inner = "wikihop"

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
    """Return the example of one object. Raises DataError naming file, number and id if it is malformed."""
    named = isinstance(row, dict) and isinstance(row.get("id"), str)
    which = f"example {location.line}" + (f' ("{row["id"][:80]}")' if named else "")

    def refuse(problem: str, hint: str = HINT) -> DataError:
        return DataError(str(location), f"{which}: {problem}", hint)

    if not isinstance(row, dict):
        raise refuse(f"{json.dumps(row)[:80]} is no object", FORM)
    for key, kind in KEYS.items():
        if key not in row:
            raise refuse(f'has no "{key}"', FORM)
        if not isinstance(row[key], kind) or not all(isinstance(text, str) for text in row[key]):
            expected = "text" if kind is str else "list of texts"
            raise refuse(f'"{key}" is no {expected} but {json.dumps(row[key])[:80]}', FORM)
        texts = [row[key]] if kind is str else row[key]
        if key != "supports" and (not texts or "" in map(str.strip, texts)):
            raise refuse(f'"{key}" is empty, or has an empty text')
    candidates, answer = row["candidates"], row.get("answer")
    if len(set(candidates)) < len(candidates):
        twice = next(text for text in candidates if candidates.count(text) > 1)
        raise refuse(f'"{twice[:80]}" is twice among the candidates', "Remove one of the two")
    if answer is not None and answer not in candidates:
        hint = f"Its candidates are: {', '.join(candidates)[:200]}. Without an answer leave the key out"
        raise refuse(f"the answer {json.dumps(answer)[:80]} is not among the candidates", hint)
    label = None if answer is None else candidates.index(answer)
    inputs = (row["query"], *candidates, *row["supports"])
    return Choice(inputs, label, location, row["id"], len(candidates))
