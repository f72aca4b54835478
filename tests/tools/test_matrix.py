"""The matrix of versions, without any environment."""

import os

import pytest

from tools import matrix


def test_a_row_without_environment_fails_and_the_others_still_run(tmp_path, monkeypatch, capsys):
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\nexit 2\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("sys.argv", ["matrix"])
    with pytest.raises(SystemExit, match="True"):
        matrix.main()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[2:]] == list(matrix.ROWS) and len({len(row) for row in rows}) == 1
    assert all("uv venv failed" in row for row in rows[2:])
