"""Runs started from Python, and the steps of the quickstart."""

import bz2
import json
import random
import re
import signal
import zipfile

import pytest

from megasparse.cli.main import main
from megasparse.data.tokenizers.simple import vocabulary_file
from megasparse.errors import CheckpointError
from megasparse.hub.export import to_hf
from megasparse.planning.dry_run import dry_run_report
from megasparse.runs import quickstart as steps
from megasparse.runs.api import evaluate, generate
from megasparse.runs.finetuning import finetune, finetune_dry_run
from megasparse.runs.pretraining import pretrain
from megasparse.settings.load import build_config, load_config
from megasparse.training.run import RunResult
from megasparse.training.stopping.signals import STOPPING
from tests.helpers.finetuning import bert, configured, reviews
from tests.helpers.tiny import metrics
from tests.helpers.trained import prepared

FULL = {"pattern": ["full"]}


def test_pretraining_resumes_where_it_stopped(tmp_path):
    run = tmp_path / "run"
    settings = {
        "run": {"directory": str(run), "engine": "torch", "device": "cpu"},
        "model": {"max_length": 64, "layers": 1, "d_model": 16, "d_ff": 32, "heads": 2, "attention": FULL},
        "data": {"path": str(prepared(tmp_path)), "sequence_length": 64},
        "training": {"steps": 3, "global_batch": 2, "micro_batch": 2},
    }
    config = build_config(settings, [])
    _, trial, plan = dry_run_report(config, gpus=1)
    assert len(list(dry_run_report(config))) == 2 and not run.exists()
    assert "planned for A100" in plan and "3 steps on this machine: about 0." in trial and "torchrun" not in trial
    handlers = [signal.getsignal(number) for number in STOPPING]
    assert pretrain(config, stop_at=2) == RunResult(run, 2, complete=False)
    assert pretrain(config, stop_at=1) == RunResult(run, 2, complete=False)
    assert pretrain(config) == RunResult(run, 3, complete=True)
    assert [line["step"] for line in metrics(config)] == [1, 2, 3]
    assert [signal.getsignal(number) for number in STOPPING] == handlers
    with pytest.raises(CheckpointError, match="a new run here would overwrite this one"):
        pretrain(config, resume="never")


def test_fine_tuning_names_its_best_checkpoint_when_it_is_complete(tmp_path):
    run = tmp_path / "run"
    config = configured(run, reviews(tmp_path / "reviews.csv", 24), start={"huggingface": str(bert(tmp_path / "bert"))})
    report = dict(re.split(" {2,}", line, maxsplit=1) for line in finetune_dry_run(config).splitlines())
    assert not run.exists() and report["steps"] == "6, of 8 examples"
    assert report["parameters"].endswith(" trained, 0 frozen") and report["micro-batch"].startswith("4 × ")
    assert 0 <= float(report["peak memory"].partition(" GB measured")[0]) < 2
    assert finetune(config, stop_at=2) == RunResult(run, 2, complete=False)
    assert not (run / "best.json").exists()
    assert finetune(config) == RunResult(run, 6, complete=True)
    assert json.loads((run / "best.json").read_text())["step"] in (2, 4, 6)


WORDS = ["hashed", "attention", "sees", "far", "and", "reads", "every", "byte"]
TINY = ("model.layers=2", "model.d_model=32", "model.d_ff=64", "model.ngrams.rows=64")


@pytest.mark.slow
def test_every_step_runs_and_the_file_is_as_long_as_evaluation_promises(tmp_path, monkeypatch, capfd):
    words = random.Random(0)
    text = " ".join(words.choice(WORDS) for _ in range(8_000)).encode()
    with zipfile.ZipFile(tmp_path / "wheel", "w") as wheel:
        wheel.writestr(steps.MEMBER, bz2.compress(text))
    started = steps.megasparse

    def command(*words):
        """Training starts as a process, as for users; the other commands run in this process for speed."""
        started(*words) if words[0] == "pretrain" else main([str(word) for word in words])

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
    assert re.search(rf"its file +{summary['file_bits_per_dim']:.3f}", said) and "Next:" in said


def test_a_renamed_run_uses_its_copy_of_its_tokenizer(tmp_path, monkeypatch):
    (tmp_path / "words.txt").write_bytes(vocabulary_file([b"hashed attention sees far and reads every byte\n"]))
    (tmp_path / "books").mkdir()
    for name in "abcdefghij":
        (tmp_path / "books" / f"{name}.txt").write_text(" ".join(WORDS * 20))
    run, moved, settings = (
        tmp_path / "run",
        tmp_path / "moved",
        {
            "run": {"directory": str(tmp_path / "run"), "engine": "torch", "device": "cpu"},
            "model": {"max_length": 64, "layers": 1, "d_model": 16, "d_ff": 32, "heads": 2, "attention": FULL},
            "data": {"sequence_length": 64, "tokenizer": str(tmp_path / "words.txt")},
            "training": {"steps": 3, "global_batch": 2, "micro_batch": 2},
        },
    )
    pretrain(build_config(settings, []), texts=str(tmp_path / "books"), stop_at=2)
    run.rename(moved)
    (tmp_path / "words.txt").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert evaluate(moved, split="validation")["bits_per_token"] > 0
    assert generate(moved, "far and", tokens=2)
    assert (to_hf(moved, "export") / "tokenizer.json").is_file()
    start = {"checkpoint": str(moved)}
    finetune(configured(tmp_path / "tuned", reviews(tmp_path / "reviews.csv", 24), start=start), stop_at=1)
    config = load_config(moved / "config.json", [f"run.directory={moved}"])
    assert pretrain(config, texts=str(tmp_path / "books")) == RunResult(moved, 3, complete=True)
