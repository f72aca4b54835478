"""Routing attention on two ranks: the centroids of one process at every ZeRO stage, in fp32, and saved once."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megasparse.config.schema import Config
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.training.checkpoints.checkpoint import Checkpoint, load_weights, persistent_buffers
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines.build import build_engine
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, start_ranks
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import DummyBatches, identity_of, tiny_config

STAGES = (0, 2, 3)


def config_of(folder: Path, engine: str, **sections: dict[str, Any]) -> Config:
    model = {
        "max_length": 24, "layers": 2, "d_model": 16, "d_ff": 16, "heads": 2, "positions": {"kind": "learned"},
        "attention": {"pattern": ["routing"], "routing": {"chunk": 4, "decay": 0.5}},
    }  # fmt: skip
    return tiny_config(folder, engine, model=model, training={"precision": "bf16"}, **sections)


def after_a_step(config: Config, ranks: Ranks) -> Engine:
    engine = build_engine(build_model(config.model, 0), config, partial(RngContext, 0, training=True), ranks)
    assert engine.train_step(next(DummyBatches(config, ranks)).micro_batches, 1, 0.01).applied
    return engine


def on_two_ranks(folder: str) -> dict[str, Any]:
    found = {}
    for stage in STAGES:
        config = config_of(Path(folder) / str(stage), "deepspeed", deepspeed={"zero_optimization": {"stage": stage}})
        ranks = start_ranks(config.run)
        engine = after_a_step(config, ranks)
        Saver(identity_of(config), ranks).save(engine, 1, 8, {})
        buffers = persistent_buffers(engine.module)
        found[str(stage)] = {name: [str(buffer.dtype), buffer.tolist()] for name, buffer in buffers.items()}
        engine.close()
    ranks.stop()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, run_ranks(on_two_ranks, folder=str(folder))


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_have_the_centroids_of_one(found, tmp_path, stage):
    folder, (first, second) = found
    assert first == second
    config = config_of(tmp_path, "torch")
    alone = persistent_buffers(after_a_step(config, Ranks()).module)
    restored = build_model(config.model, 3)
    load_weights(restored, Checkpoint.open(folder / str(stage) / "checkpoints" / "00000001"))
    assert len(alone) == 2
    for name, buffer in alone.items():
        dtype, numbers = first[str(stage)][name]
        assert dtype == "torch.float32"
        torch.testing.assert_close(torch.tensor(numbers), buffer, rtol=0, atol=1e-6)
        assert persistent_buffers(restored)[name].tolist() == numbers
