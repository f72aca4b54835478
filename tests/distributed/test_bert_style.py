"""Encoders with both of BERT's objectives on two ranks under ZeRO: losses of one process, and an exact resume."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megasparse.config.schema import Config
from megasparse.data.batches import Step
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.run_folder import find_newest
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines.build import build_engine
from megasparse.training.ranks import Ranks, start_ranks
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import DummyBatches, identity_of, tiny_config

STAGES = (1, 2, 3)
STEPS = 6
PADDING, BEGIN, SEPARATOR = 257, 258, 259
MODEL: dict[str, Any] = {
    "kind": "encoder", "style": "bert", "vocabulary": 260, "max_length": 24, "layers": 2, "d_model": 33, "d_ff": 17,
    "heads": 3, "blocks": "ordinary", "activations": "checkpoint", "dropout": 0.1, "feed_forward_tiles": 3,
    "loss_tiles": 2, "tied_embeddings": True, "token_types": 2, "padding_token": PADDING,
    "sentence_order": {"separator": SEPARATOR}, "masking": {"whole_words": True},
    "positions": {"kind": "learned", "offset": 2},
    "attention": {"pattern": ["yoso", {"lsh": 1, "full": 2}], "yoso": {"hashes": 4}, "lsh": {"chunk": 8}},
}  # fmt: skip


REVERSIBLE = {"style": "reformer", "token_types": 0, "blocks": "reversible", "activations": "reversible"}


class Pairs(DummyBatches):
    """Records of two segments, of unlike lengths."""

    def __next__(self) -> Step:
        step = super().__next__()
        for batch in step.micro_batches:
            for row, sample in zip(batch.tokens, batch.samples.tolist(), strict=True):
                end = 11 + sample % 12
                row[0], row[5], row[end], row[end + 1 :] = BEGIN, SEPARATOR, SEPARATOR, PADDING
        return step


def config_of(folder: Path, engine: str = "torch", changes: dict[str, Any] = {}, **sections: dict[str, Any]) -> Config:  # noqa: B006
    return tiny_config(folder, engine, model={**MODEL, **changes}, **sections)


def losses(config: Config, ranks: Ranks, first: int = 1, last: int = STEPS, save: Saver | None = None) -> list[float]:
    """Losses of steps first..last; with `save`, from its newest checkpoint, if any, to a new one."""
    newest = find_newest(save.directory) if save else None
    opened = Checkpoint.open(newest) if newest else None
    model: Any = build_model(config.model, 0)
    model.set_word_starts(torch.arange(260) % 3 == 0)
    engine = build_engine(model, config, partial(RngContext, 0, training=True), ranks, opened)
    found, position = [], opened.sequences if opened else 0
    for step, data in zip(range(first, last + 1), Pairs(config, ranks, position), strict=False):
        result = engine.train_step(data.micro_batches, step, 0.003)
        assert result.applied
        found += [result.loss, result.grad_norm]
        position = data.position
    if save:
        save.save(engine, last, position, {})
    engine.close()
    return found


def on_two_ranks(folder: str) -> dict[str, list[float]]:
    found = {}
    for stage in STAGES:
        place = Path(folder) / str(stage)
        config = config_of(place, "deepspeed", deepspeed={"zero_optimization": {"stage": stage}})
        ranks = start_ranks(config.run)
        found[f"{stage}"] = losses(config, ranks)
        save = Saver(identity_of(config), ranks)
        found[f"{stage} resumed"] = losses(config, ranks, 1, 3, save) + losses(config, ranks, 4, STEPS, save)
    reversible = config_of(place / "reversible", "deepspeed", REVERSIBLE, deepspeed=config.deepspeed)
    found["reversible"] = losses(reversible, ranks, last=3)
    ranks.stop()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(on_two_ranks, timeout=900, folder=str(tmp_path_factory.mktemp("two")))


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_are_one_and_resume_exactly(found, stage, tmp_path):
    alone = losses(config_of(tmp_path), Ranks())
    assert alone[-2] < alone[0]
    for rank in found:
        assert rank[f"{stage}"] == pytest.approx(alone, rel=1e-5)
        assert rank[f"{stage} resumed"] == rank[f"{stage}"]


def test_reversible_ones_too(found, tmp_path):
    alone = losses(config_of(tmp_path, changes=REVERSIBLE), Ranks(), last=3)
    for rank in found:
        assert rank["reversible"] == pytest.approx(alone, rel=1e-5)
