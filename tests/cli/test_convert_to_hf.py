import sys

from tests.helpers.commands import refused, run
from tests.helpers.hub import checkpoint, decoder
from tools import convert_to_hf


def test_a_run_is_converted(tmp_path, capsys):
    checkpoint(decoder("local"), tmp_path / "run")
    run(convert_to_hf, "--checkpoint", tmp_path / "run", "--output", tmp_path / "deep" / "out")
    assert f"wrote {tmp_path / 'deep' / 'out'}" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "deep" / "out").iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json", "generation_config.json"} <= names
    assert not any(name.startswith((".", "__pycache__")) for name in names)


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys):
    refused(capsys, convert_to_hf, "--checkpoint", tmp_path, "--output", tmp_path / "out")


def test_transformers_is_asked_for_where_it_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = refused(capsys, convert_to_hf, "--checkpoint", "run", "--output", tmp_path / "out")
    assert said.startswith('error: transformers: is not installed. Install it: pip install "transformers==')
