"""docs/notebook.ipynb: its cells, run one after another as Jupyter does, with few and short steps."""

import json
from pathlib import Path

import pytest

NOTEBOOK = json.loads((Path(__file__).parents[1] / "docs/notebook.ipynb").read_text(encoding="utf-8"))
SIZE = "STEPS, LENGTH = 200, 512"


@pytest.mark.slow
def test_the_notebook_goes_from_data_to_a_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert sum(SIZE in cell for cell in cells) == 1
    names = {}
    for number, cell in enumerate(cells):
        short = cell.replace(SIZE, "STEPS, LENGTH = 4, 64").replace("[:1_000_000]", "[:50_000]")
        exec(compile(short, f"cell {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "window: " in said and "window and n-grams: " in said and "bits/dim of the test split" in said
    assert "<svg" in (tmp_path / "notebook/curves.svg").read_text()
    assert not any(
        cell.get("outputs") for cell in NOTEBOOK["cells"]
    )  # what a reader sees is what their machine computed
