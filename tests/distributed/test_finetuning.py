"""Fine-tuning on two ranks under ZeRO 2, against one process on plain torch.

One launch of two gloo ranks (`on_ranks`); the tests check its report."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megasparse.ops.random import RngContext
from megasparse.optimizers import learning_rate
from megasparse.tasks.run import open_run, predict_examples, validation
from megasparse.training.engines import build_engine
from megasparse.training.ranks import Ranks, RunHooks, start_ranks
from tests.helpers.finetuning import ENCODER, configured, reviews
from tests.helpers.run_ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS = 4
ATTENTION: dict[str, Any] = {"pattern": ["local", "lha"], "local": {"chunk": 8}, "lha": {"chunk": 8}}
ZERO = {"zero_optimization": {"stage": 2}}


def finetune(folder: Path, ranks: Ranks, engine: str) -> dict[str, Any]:
    sections = {
        "model": {**ENCODER, "attention": ATTENTION},
        "task": {"max_length": 128},
        "run": {"engine": engine},
        "training": {"steps": STEPS, "global_batch": 8, "micro_batch": 2},
        "evaluation": {"every": STEPS, "batch": 4},
        **({"deepspeed": ZERO} if engine == "deepspeed" else {}),
    }
    run = open_run(configured(folder / "run", folder / "reviews.csv", **sections), lambda line: None)

    def rng(step: int, samples: torch.Tensor) -> RngContext:
        return RngContext(0, step, samples, training=True)

    built = build_engine(run.model, run.config, rng, ranks)
    validate = validation(run, built, RunHooks())
    before = validate(STEPS)
    reported = [
        [each.values.tolist(), each.cost, each.weight]
        for each in predict_examples(built.evaluate, run.form, run.validation, run.config, ranks)
    ]
    built.module.train()
    losses = []
    for step, data in zip(range(1, STEPS + 1), run.batches(ranks, 0), strict=False):
        rate = learning_rate(step, 2 * STEPS, run.config.optimizer)
        result = built.train_step(data.micro_batches, step, rate)
        losses.append([result.loss, result.grad_norm, result.statistics["accuracy"]])
    found = {"losses": losses, "before": before, "reported": reported, "after": validate(STEPS)}
    built.close()
    return found


def on_ranks(folder: str) -> dict[str, Any]:
    place = Path(folder)
    ranks = start_ranks(configured(place / "run", place, start={"huggingface": "x"}, run={"engine": "deepspeed"}).run)
    report = finetune(place, ranks, "deepspeed")
    ranks.stop()
    return report


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetuning")
    reviews(folder / "reviews.csv", 44)
    first, second = run_ranks(on_ranks, 2, timeout=900, folder=str(folder))
    assert json.dumps(first) == json.dumps(second)
    return {"ranks": first, "alone": finetune(folder, Ranks(), "torch")}


def test_two_ranks_have_the_losses_of_one(report):
    for mine, theirs in zip(report["ranks"]["losses"], report["alone"]["losses"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    first, *_, last = (loss for loss, _, _ in report["alone"]["losses"])
    assert first != last


def test_a_validation_on_two_ranks_equals_one(report):
    """The same bits before training, where the weights are the same."""
    mine, theirs = report["ranks"], report["alone"]
    assert mine["reported"] == theirs["reported"] and len(mine["reported"]) == 11
    assert mine["before"] == theirs["before"]
    assert mine["after"] == pytest.approx(theirs["after"], abs=1e-5)
