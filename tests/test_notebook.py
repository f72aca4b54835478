"""docs/notebook.ipynb: its cells run with few short steps, and the site shows them with their outputs."""

import json
from pathlib import Path

import pytest

from tests.test_site import hooks

NOTEBOOK = json.loads((Path(__file__).parents[1] / "docs/notebook.ipynb").read_text(encoding="utf-8"))
SIZE = "STEPS, LENGTH = 200, 512"


@pytest.mark.slow
def test_the_cells_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert sum(SIZE in cell for cell in cells) == 1
    names = {}
    for number, cell in enumerate(cells):
        short = cell.replace(SIZE, "STEPS, LENGTH = 4, 64").replace("[:1_000_000]", "[:50_000]")
        exec(compile(short, f"cell {number}", "exec"), names)
    assert "bits/dim of the test split" in capsys.readouterr().out
    weights = names["weights_of"](names["lsh"], names["lsh"].mechanism)[0, 0]
    assert not weights[names["buckets"][:, None] != names["buckets"]].any()  # a byte attends only to its bucket


def test_the_page_shows_each_cell_and_output():
    page = "".join(hooks().GENERATED["notebook.md"]())
    shown = [output for cell in NOTEBOOK["cells"] for output in cell.get("outputs", ())]
    assert page.count("```python") == sum(cell["cell_type"] == "code" for cell in NOTEBOOK["cells"])
    assert page.count('src="data:image/png') == sum("data" in output for output in shown) == 3
    assert "bits/dim of the test split\n```" in page and "# Train" not in page.replace("## Train", "")
