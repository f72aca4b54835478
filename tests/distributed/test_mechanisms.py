"""Every mechanism and every kind of model on two ranks under ZeRO: the losses of one process of plain torch.

Draws, sampled keys and hashes depend on the global sample and head, so the number of ranks moves nothing. One launch of
two gloo ranks (`on_two_ranks`) runs all cases."""

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megasparse.config.attention import MECHANISMS
from megasparse.config.schema import Config
from megasparse.data.batches import Step
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import find_newest
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines import build_engine
from megasparse.training.ranks import Ranks, start_ranks
from tests.helpers.models import SMALL
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import DummyBatches, identity_of, tiny_config

pytestmark = pytest.mark.slow

STEPS = 3
PATTERNS: dict[str, list[dict[str, int]]] = {
    "decoder": [
        {"lha": 1, "yoso": 1, "local": 1},
        {"smart_bird": 1, "performer": 1, "bigbird": 1},
        {"routing": 1, "random": 1, "lsh": 1},
        {"longformer": 1, "sparse_transformer": 1, "full": 1},
        {"ngram": 2, "ranked": 1},
    ],
    "encoder": [
        {"smyrf": 1, "linformer": 1, "lha": 1},
        {"yoso": 1, "smart_bird": 1, "lsh": 1},
        {"linear": 1, "synthesizer": 1, "clustered": 1},
        {"sinkhorn": 2, "full": 1},
    ],
    "encoder_decoder": [{"lha": 2, "full": 1}, {"lsh": 2, "local": 1}],
}
PAIRS = {  # of 10 and 14 tokens, among which those with id 7 are left out: not equally many on both ranks
    "source": {"length": 10, "attention": {"pattern": [{"lha": 1, "lsh": 2}], **SMALL}},
    "padding_token": 7,
    "tied_embeddings": True,
}
PADDING, BEGIN, SEPARATOR = 257, 258, 259
BERT: dict[str, Any] = {
    "kind": "encoder", "style": "bert", "vocabulary": 260, "max_length": 24, "layers": 2, "d_model": 33, "d_ff": 17,
    "heads": 3, "blocks": "ordinary", "activations": "checkpoint", "dropout": 0.1, "feed_forward_tiles": 3,
    "loss_tiles": 2, "tied_embeddings": True, "token_types": 2, "padding_token": PADDING,
    "sentence_order": {"separator": SEPARATOR}, "masking": {"whole_words": True},
    "positions": {"kind": "learned", "offset": 2},
    "attention": {"pattern": ["yoso", {"lsh": 1, "full": 2}], "yoso": {"hashes": 4}, "lsh": {"chunk": 8}},
}  # fmt: skip


def model_of(kind: str) -> dict[str, Any]:
    settings = SMALL | {"yoso": SMALL["yoso"] | {"convolution": 3}, "local": {"chunk": 8, "relative": True}}
    return {
        "kind": kind, "vocabulary": 257, "max_length": 24, "layers": len(PATTERNS[kind]), "d_model": 33, "d_ff": 17,
        "heads": 3, "dropout": 0.1, "positions": {"kind": "learned"},
        "attention": {"pattern": PATTERNS[kind], **settings}, **(PAIRS if kind == "encoder_decoder" else {}),
    }  # fmt: skip


REVERSIBLE = {"style": "reformer", "token_types": 0, "blocks": "reversible", "activations": "reversible"}
GROUPED_HEADS = model_of("decoder") | {
    "heads": 4, "head_dim": 8, "layers": 2, "feed_forward_tiles": 3,
    "attention": {"pattern": [{"lha": 2, "routing": 2}, {"lsh": 2, "yoso": 2}], **SMALL, "head_groups": 2},
}  # fmt: skip
MODELS = {kind: model_of(kind) for kind in PATTERNS} | {
    "bert": BERT, "reversible pairs": BERT | REVERSIBLE, "head groups": GROUPED_HEADS,
    "head groups, stored": GROUPED_HEADS | {"blocks": "ordinary", "activations": "stored"},
}  # fmt: skip
STAGES = {"decoder": (2, 3), "encoder": (2, 3), "encoder_decoder": (0, 2, 3), "bert": (1, 3), "reversible pairs": (3,)}
STAGES |= {"head groups": (2, 3), "head groups, stored": (3,)}
CASES = [(name, stage) for name, stages in STAGES.items() for stage in stages]


class Pairs(DummyBatches):
    def __next__(self) -> Step:
        step = super().__next__()
        for batch in step.micro_batches:
            for row, sample in zip(batch.tokens, batch.samples.tolist(), strict=True):
                end = 11 + sample % 12
                row[0], row[5], row[end], row[end + 1 :] = BEGIN, SEPARATOR, SEPARATOR, PADDING
        return step


def config_of(folder: Path, model: dict[str, Any], stage: int | None = None, **sections: dict[str, Any]) -> Config:
    zero = {} if stage is None else {"deepspeed": {"zero_optimization": {"stage": stage}}}
    return tiny_config(folder, "torch" if stage is None else "deepspeed", model=model, **zero, **sections)


def losses(config: Config, ranks: Ranks, first: int = 1, last: int = STEPS, save: Saver | None = None) -> list[float]:
    newest = find_newest(save.directory) if save else None
    opened = Checkpoint.open(newest) if newest else None
    model: Any = build_model(config.model, 0)
    if config.model.masking.whole_words:
        model.set_word_starts(torch.arange(260) % 3 == 0)
    engine = build_engine(model, config, partial(RngContext, 0, training=True), ranks, opened)
    position = opened.sequences if opened else 0
    batches = (Pairs if config.model.sentence_order else DummyBatches)(config, ranks, position)
    found = []
    for step, data in zip(range(first, last + 1), batches, strict=False):
        result = engine.train_step(data.micro_batches, step, 0.003)
        assert result.applied
        found += [result.loss, result.grad_norm]
        position = data.position
    if save:
        save.save(engine, last, position, {})
    engine.close()
    return found


def on_two_ranks(folder: str) -> dict[str, Any]:
    place, found = Path(folder), dict[str, Any]()
    ranks = start_ranks(config_of(place, MODELS["decoder"], 2).run)
    for name, stage in CASES:
        found[f"{name} {stage}"] = losses(config_of(place / f"{name}{stage}", MODELS[name], stage), ranks)
    found["compiler"] = [name for name in ("torch._inductor.codecache", "networkx") if name in sys.modules]
    config = config_of(place / "resumed", BERT, 3)
    save = Saver(identity_of(config), ranks)
    found["bert resumed"] = losses(config, ranks, 1, 1, save) + losses(config, ranks, 2, STEPS, save)
    ranks.stop()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(on_two_ranks, timeout=900, folder=str(tmp_path_factory.mktemp("two")))


@cache
def alone(name: str) -> list[float]:
    return losses(config_of(Path("never"), MODELS[name]), Ranks())


def test_every_mechanism_is_there():
    assert {kind for pattern in PATTERNS.values() for split in pattern for kind in split} == set(MECHANISMS)


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_two_ranks_are_one(found, name, stage):
    assert alone(name)[-2] != alone(name)[0]
    for rank in found:
        assert rank[f"{name} {stage}"] == pytest.approx(alone(name), rel=1e-5)


def test_deepspeed_starts_without_a_compiler(found):
    assert [rank["compiler"] for rank in found] == [[], []]


def test_an_encoder_with_both_of_berts_objectives_resumes_exactly(found):
    for rank in found:
        assert rank["bert resumed"] == rank["bert 3"]
