"""The quickstart, with a text and a model that are smaller: every step, and its files."""

import bz2
import json
import random
import zipfile

import pytest

from megasparse.cli.main import main
from megasparse.runs import quickstart as steps

WORDS = ["hashed", "attention", "sees", "far", "and", "reads", "every", "byte"]
TINY = ("model.layers=2", "model.d_model=32", "model.d_ff=64", "model.max_length=512", "data.sequence_length=512")


@pytest.mark.slow
def test_every_step_runs_and_the_file_is_as_long_as_evaluation_promises(tmp_path, monkeypatch, capfd):
    words = random.Random(0)
    text = " ".join(words.choice(WORDS) for _ in range(8_000)).encode()
    with zipfile.ZipFile(tmp_path / "wheel", "w") as wheel:
        wheel.writestr(steps.MEMBER, bz2.compress(text))
    started = steps.megasparse

    def command(*words):
        """The training is started as users have it; the others run here, where what they need is imported."""
        started(*words) if words[0] == "supervise" else main([str(word) for word in words])

    monkeypatch.setattr(steps, "megasparse", command)
    monkeypatch.setattr(steps, "fetch_wheel", lambda *_: tmp_path / "wheel")
    monkeypatch.setattr(steps, "SMALL", ("training.steps=2", *TINY, *steps.SMALL[1:]))
    monkeypatch.chdir(tmp_path)
    steps.quickstart(small=True)
    run = tmp_path / "runs" / "quickstart_small"
    held_out = (run / "held_out.txt").read_bytes()
    assert text.endswith(held_out) and len(held_out) > 2000
    summary = json.loads((run / "summary.json").read_text())
    assert summary["file_bits_per_dim"] == pytest.approx(summary["bits_per_dim"], rel=0.01)
    assert (run / "report.html").exists()
    said = capfd.readouterr().out
    assert f"its file   {summary['file_bits_per_dim']:.3f}" in said and "Next:" in said


def test_an_evaluation_of_an_older_checkpoint_is_made_again(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(steps, "megasparse", lambda *words: asked.append(words[0]))
    (tmp_path / "checkpoints" / "00000002").mkdir(parents=True)
    for step in (2, 1):
        (tmp_path / "evaluation.json").write_text(json.dumps({"protocol": {"checkpoint_step": step}}))
        steps.evaluate(tmp_path)
    assert asked == ["evaluate"]


def test_a_missing_coder_leaves_one_step_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(steps, "megasparse", None)
    steps.compress(tmp_path, tmp_path / "held_out.txt")
    assert "pip install 'megasparse[compress]'" in capsys.readouterr().out
