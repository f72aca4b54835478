import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.hub import checkpoint, decoder
from tools import convert_to_hf

ROOT = Path(__file__).parents[2]


def convert(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["convert_to_hf.py", *map(str, arguments)])
    convert_to_hf.main()


def test_a_run_is_converted(tmp_path, monkeypatch, capsys):
    checkpoint(decoder("local"), tmp_path / "run")
    convert(monkeypatch, "--checkpoint", tmp_path / "run", "--output", tmp_path / "deep" / "out")
    assert f"wrote {tmp_path / 'deep' / 'out'}" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "deep" / "out").iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json", "generation_config.json"} <= names
    assert not any(name.startswith((".", "__pycache__")) for name in names)


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        convert(monkeypatch, "--checkpoint", tmp_path, "--output", tmp_path / "out")
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1


def test_transformers_is_asked_for_where_it_is_missing(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')")
    command = [sys.executable, "tools/convert_to_hf.py", "--checkpoint", "run", "--output", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith('error: transformers: is not installed. Install it: pip install "transformers==')
    assert done.stderr.count("\n") == 1


def test_help_shows_commands(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        convert(monkeypatch, "--help")
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert "megasparse convert to-hf --checkpoint runs/quickstart --output" in text and "--evaluation" in text
