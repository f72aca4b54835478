"""Documents and the files of docs/measured and docs/pictures that their figures come from."""

import json
import statistics
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def read(name):
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


def shown(document):
    """The document's text on one line, so that a sentence may break anywhere."""
    return " ".join((DOCS / document).read_text(encoding="utf-8").split())


def spread(values):
    return f"{statistics.mean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if values[1:] else "")


def assert_shown(document, rows):
    """Every row stands in the document."""
    text = shown(document)
    missing = [row for row in rows if " ".join(row.split()) not in text]
    assert not missing, "\n".join(missing)
