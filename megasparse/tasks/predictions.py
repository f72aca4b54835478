"""Predictions of a fine-tuned model, and the files they are written to. N examples."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from megasparse.errors import ConfigError, DataError, UserError
from megasparse.evaluation.outputs import whole_file
from megasparse.tasks.encoding import Encoded
from megasparse.tasks.form import Form
from megasparse.tasks.restore import Finetuned
from megasparse.tasks.run import encode_all, read_files
from megasparse.tasks.scoring import Prediction, predict_examples
from megasparse.tasks.sources import chosen_files
from megasparse.tasks.task import Example, SourceLocation

Row = dict[str, Any]
"""A prediction: `name` of the example, its `file` and `line` (null where it has the file to itself), `label` (null
where it has none), `predicted`, and what the task's form adds, such as `probabilities` of classes."""


def read(found: Finetuned, examples: Iterable[Example], name: str, say: Callable[[str], None]) -> Sequence[Encoded]:
    """Encode examples for the model. say: prints their counts."""
    return found.form.collected(encode_all(found.encoder, name, examples, say))


def predicted(found: Finetuned, examples: Sequence[Encoded], seed: int | None = None) -> list[Prediction]:
    """Predict with a progress bar. seed: of the draws of randomised attention; None takes `run.seed`. Raises UserError
    where a prediction is not finite.
    """
    config = found.config
    if seed is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    total = -(-len(examples) // config.evaluation.batch)
    with torch.no_grad(), tqdm(total=total, desc="scoring", unit="batch", leave=False, disable=None) as bar:
        table = predict_examples(found.model, found.form, examples, config, found.ranks, bar.update)
    if not all(np.isfinite(each.values).all() for each in table):
        hint = "Take an earlier checkpoint, or --set training.precision=fp32"
        raise UserError(f"{found.checkpoint.path}: the predictions are not finite. {hint}")
    return table


def predictions(form: Form, examples: Sequence[Encoded], table: Sequence[Prediction]) -> list[Row]:
    """The rows of a prediction file, in the order of the examples."""
    return [
        {
            "name": example.name,
            "file": str(example.location.file),
            "line": example.location.line,
            **form.row(example, own.values),
        }
        for example, own in zip(examples, table, strict=True)
    ]


def predict(found: Finetuned, sources: Sequence[str], say: Callable[[str], None]) -> list[Row]:
    """Predictions for every example of the files, in their order. Raises DataError where there is none."""
    _, files = chosen_files(found.task, sources, None)
    encoded = read(found, read_files(found.task, files), "new", say)
    if not encoded:
        raise DataError(sources[0], "has no examples", "Give files that have some")
    return predictions(found.form, encoded, predicted(found, encoded))


def predict_texts(found: Finetuned, texts: Sequence[str], say: Callable[[str], None]) -> Row:
    """The prediction for one example, given by its texts. Raises ConfigError where the task has other inputs."""
    encoded = read(found, [found.form.example(texts)], "new", say)
    return predictions(found.form, encoded, predicted(found, encoded))[0]


def write_predictions(path: Path, rows: Sequence[Row], form: Form) -> None:
    """Write a file by its suffix: .jsonl, an object a line; .json, an object of `predicted` by name, WikiHop's form of
    submission; .csv, `name`, `predicted` and `probability of CLASS`; .tsv, GLUE's form of submission, `index` and
    `prediction`; .txt, a line each as the task's form has it. Raises ConfigError for another suffix, DataError for a
    name that a .tsv cannot hold, or that a .json would have twice, and UserError where it cannot be written.
    """
    require_form(path)
    with whole_file(path) as out:
        for line in FORMS[path.suffix](rows, form):
            out.write(line.encode())


def require_form(path: Path) -> None:
    """Raise ConfigError for a suffix of no known form."""
    if path.suffix not in FORMS:
        problem = f'"{path.suffix}" is no known form of predictions: {path}'
        raise ConfigError("--output", problem, f"Give a name that ends in {', '.join(FORMS)}")


def _json_lines(rows: Sequence[Row], form: Form) -> Iterator[str]:
    for row in rows:
        yield json.dumps(row) + "\n"


def _json_object(rows: Sequence[Row], form: Form) -> Iterator[str]:
    table: dict[str, Any] = {}
    for row in rows:
        if row["name"] in table:
            location = str(SourceLocation(Path(row["file"]), row["line"]))
            raise DataError(location, f'"{row["name"]}" comes twice, which a .json cannot hold', "Write a .jsonl")
        table[row["name"]] = row["predicted"]
    yield json.dumps(table, indent=1) + "\n"


def _lines(rows: Sequence[Row], form: Form) -> Iterator[str]:
    for row in rows:
        yield form.line(row) + "\n"


def _comma_separated(rows: Sequence[Row], form: Form) -> Iterator[str]:
    classes = list(rows[0].get("probabilities") or ())
    table = [["name", "predicted", *(f"probability of {name}" for name in classes)]]
    table += [[row["name"], _cell(row["predicted"]), *((row.get("probabilities") or {}).values())] for row in rows]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(table)
    yield out.getvalue()


def _tab_separated(rows: Sequence[Row], form: Form) -> Iterator[str]:
    yield "index\tprediction\n"
    for row in rows:
        fields = [str(row["name"]), str(_cell(row["predicted"]))]
        if any(mark in field for field in fields for mark in "\t\r\n"):
            location = str(SourceLocation(Path(row["file"]), row["line"]))
            raise DataError(location, f"{fields} has a tab or a line end, which a .tsv cannot hold", "Write a .csv")
        yield "\t".join(fields) + "\n"


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


FORMS: dict[str, Callable[[Sequence[Row], Form], Iterator[str]]] = {
    ".jsonl": _json_lines,
    ".json": _json_object,
    ".txt": _lines,
    ".csv": _comma_separated,
    ".tsv": _tab_separated,
}
