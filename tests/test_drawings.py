"""The pictures of docs/how-it-works.md show the current mechanisms."""

import importlib.util
from pathlib import Path

import pytest

PICTURES = Path(__file__).parents[1] / "docs/pictures"


@pytest.mark.slow
def test_redrawn_pictures_equal_the_pictures_of_the_documents(tmp_path, monkeypatch):
    found = importlib.util.spec_from_file_location("draw_mechanisms", PICTURES / "draw_mechanisms.py")
    drawing = importlib.util.module_from_spec(found)
    found.loader.exec_module(drawing)
    monkeypatch.setattr(drawing, "FOLDER", tmp_path)
    drawing.main()
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert len(drawn) == len(drawing.KINDS) + 2
    assert drawn == {name: (PICTURES / name).read_text(encoding="utf-8") for name in drawn}
