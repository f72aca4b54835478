"""The command that writes a run's page."""

import json

from tests.helpers.commands import refused
from tools import report


def test_a_page_is_written_into_the_runs_folder_or_where_it_is_asked_for(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "train/loss": 2.0}) + "\n")
    report.main([str(tmp_path)])
    report.main([str(tmp_path), "--output", str(tmp_path / "other.html")])
    for name in ("report.html", "other.html"):
        assert "Loss" in (tmp_path / name).read_text()


def test_where_there_is_no_run_one_line_says_so(tmp_path, capsys):
    for path, what in ((tmp_path, "has neither config.json nor metrics.jsonl"), (tmp_path / "none", "is no folder")):
        said = refused(capsys, report, path)
        assert str(path) in said and what in said
    assert list(tmp_path.iterdir()) == [], "nothing half-written"
