"""The picture of measured time and memory."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from megasparse.cli.main import main

ROWS = [
    {"implementation": "sdpa", "length": 4096, "forward_backward": {"median": 0.5}, "extra_bytes": 40_000_000},
    {"implementation": "sdpa", "length": 65536, "error": "out of memory"},
    {"implementation": "lsh", "length": 4096, "forward_backward": {"median": 0.4}, "extra_bytes": 100_000_000},
    {"implementation": "lsh", "length": 65536, "forward_backward": {"median": 5.0}, "extra_bytes": 1_100_000_000},
]


def test_every_implementation_has_a_curve_and_failed_measurements_have_none(tmp_path):
    (tmp_path / "measured.json").write_text(json.dumps({"rows": ROWS}))
    main(["bench", "plot", str(tmp_path / "measured.json"), "--output", str(tmp_path / "drawn.svg")])
    text = (tmp_path / "drawn.svg").read_text()
    ElementTree.fromstring(text)  # well-formed
    assert all(
        f"<!-- {label} -->" in text for label in ("megasparse, lsh", "full attention (SDPA)", "4K", "64K", "tokens")
    )
    again = tmp_path / "again.svg"
    main(["bench", "plot", str(tmp_path / "measured.json"), "--output", str(again)])
    assert again.read_text() == text


@pytest.mark.parametrize("content", [None, "{}", '{"rows": []}', '{"rows": [{"error": "x"}]}', "[3]"])
def test_a_file_without_measurements_is_one_line(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "measured.json").write_text(content)
    with pytest.raises(SystemExit):
        main(["bench", "plot", str(tmp_path / "measured.json"), "--output", str(tmp_path / "drawn.svg")])
    assert "measured.json: " in capsys.readouterr().err and not (tmp_path / "drawn.svg").exists()
