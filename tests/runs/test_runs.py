"""Runs started from Python, as in a notebook: they return how far they are and leave the process as it was."""

import json
import signal

import pytest

from megasparse.config.load import build_config
from megasparse.errors import CheckpointError
from megasparse.runs.finetuning import finetune, finetune_dry_run
from megasparse.runs.pretraining import pretrain, pretrain_dry_run
from megasparse.training.run import RunResult
from megasparse.training.stopping.signals import STOPPING
from tests.helpers.finetuning import bert, configured, reviews
from tests.helpers.tiny import metrics
from tests.helpers.trained import prepared

FULL = {"pattern": ["full"]}


def test_pretraining_goes_on_where_it_stopped(tmp_path):
    run = tmp_path / "run"
    settings = {
        "run": {"directory": str(run), "engine": "torch", "device": "cpu"},
        "model": {"max_length": 64, "layers": 1, "d_model": 16, "d_ff": 32, "heads": 2, "attention": FULL},
        "data": {"path": str(prepared(tmp_path)), "sequence_length": 64},
        "training": {"steps": 3, "global_batch": 2, "micro_batch": 2},
    }
    config = build_config(settings, [])
    plan, _, trial = pretrain_dry_run(config)  # what needs no step comes before the step
    assert "planned" in plan and "untrained" in trial and not run.exists()
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
    start = {"huggingface": str(bert(tmp_path / "bert"))}
    config = configured(run, reviews(tmp_path / "reviews.csv", 24), start=start)
    assert "GB" in finetune_dry_run(config) and not run.exists()
    assert finetune(config, stop_at=2) == RunResult(run, 2, complete=False)
    assert not (run / "best.json").exists()
    assert finetune(config) == RunResult(run, 6, complete=True)
    assert json.loads((run / "best.json").read_text())["step"] in (2, 4, 6)
