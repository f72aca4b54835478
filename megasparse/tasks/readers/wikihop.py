"""WikiHop (Welbl et al. 2018): which of a question's candidates follows from several paragraphs of Wikipedia; as
QAngaroo publishes it, whose MedHop has files of the same form.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from megasparse.errors import DataError
from megasparse.tasks.forms.labels import Choice
from megasparse.tasks.task import Example, SourceLocation, Task

WHOLE = "Put it right, or take the official file again, whole"
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
        rows = _array(file)
        with self.skipping(file) as skipping:
            skipping.rows = len(rows)
            for number, row in enumerate(rows, start=1):
                with skipping:
                    example = _example(row, SourceLocation(file, number))
                    if example.name in names:
                        problem = f'example {number}: the id "{example.name[:80]}" is another example\'s too'
                        raise DataError(str(example.location), problem, "Give each an id of its own")
                    names.add(example.name)
                    yield example


def _array(file: Path) -> list[Any]:
    """Return the array of a JSON file. Raises DataError naming the location of what is not JSON."""
    try:
        with open(file, encoding="utf-8-sig") as stream:
            values = json.load(stream)
    except json.JSONDecodeError as error:
        problem = f"is no JSON ({error.msg}, in column {error.colno}, {error.pos:,} characters into the file)"
        raise DataError(str(SourceLocation(file, error.lineno)), problem, WHOLE) from None
    except UnicodeDecodeError as error:
        problem = f"is no UTF-8 (byte 0x{error.object[error.start]:02x})"
        raise DataError(file, problem, WHOLE) from None
    except RecursionError:
        raise DataError(file, "is nested too deeply", WHOLE) from None
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        raise DataError(file, problem, "Give train.json, dev.json, or another file of their form") from None
    if not isinstance(values, list):
        raise DataError(file, "is no JSON array of examples", f"Write [EXAMPLE, ...]. {FORM}")
    return values


def _example(row: Any, location: SourceLocation) -> Choice:
    """Return the example of one object. Raises DataError naming file, number and id if it is malformed."""
    named = isinstance(row, dict) and isinstance(row.get("id"), str)
    which = f"example {location.line}" + (f' ("{row["id"][:80]}")' if named else "")

    def refuse(problem: str, hint: str = WHOLE) -> DataError:
        return DataError(str(location), f"{which}: {problem}", hint)

    if not isinstance(row, dict):
        raise refuse(f"{json.dumps(row)[:80]} is no object", FORM)
    for key, kind in KEYS.items():
        if key not in row:
            raise refuse(f'has no "{key}"', FORM)
        if not isinstance(row[key], kind):
            expected = "text" if kind is str else "list of texts"
            raise refuse(f'"{key}" is no {expected} but {json.dumps(row[key])[:80]}', FORM)
        for text in row[key] if kind is list else ():
            if not isinstance(text, str):
                raise refuse(f'"{key}" has {json.dumps(text)[:80]}, which is no text', FORM)
    candidates, answer = row["candidates"], row.get("answer")
    for key in ("id", "query"):
        if not row[key].strip():
            raise refuse(f'"{key}" is empty')
    if not candidates:
        raise refuse('"candidates" is empty: there is nothing to choose from')
    if "" in map(str.strip, candidates):
        raise refuse("one of the candidates is empty")
    if len(set(candidates)) < len(candidates):
        twice = next(text for text in candidates if candidates.count(text) > 1)
        raise refuse(f'"{twice[:80]}" is twice among the candidates', "Remove one of the two")
    if answer is not None and answer not in candidates:
        hint = f"Its candidates are: {', '.join(candidates)[:200]}. Without an answer leave the key out"
        raise refuse(f"the answer {json.dumps(answer)[:80]} is not among the candidates", hint)
    label = None if answer is None else candidates.index(answer)
    inputs = (row["query"], *candidates, *row["supports"])
    return Choice(inputs, label, location, row["id"], len(candidates))
