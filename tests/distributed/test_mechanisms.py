"""Every mechanism, and an encoder–decoder, on two ranks under ZeRO: the losses of one process of plain torch.

Draws, sampled keys and hashes depend on the global sample and head, so the number of ranks moves nothing.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megasparse.attention.mechanisms import MECHANISMS
from megasparse.config.schema import Config
from megasparse.training.ranks import Ranks, start_ranks
from tests.helpers.models import SMALL
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import dummy_steps, tiny_config

STAGES = {"decoder": (2, 3), "encoder": (2, 3), "encoder_decoder": (0, 2, 3)}
CASES = [(kind, stage) for kind, stages in STAGES.items() for stage in stages]
STEPS = 4
PATTERNS: dict[str, list[dict[str, int]]] = {
    "decoder": [
        {"lha": 1, "yoso": 1, "local": 1},
        {"smart_bird": 1, "performer": 1, "bigbird": 1},
        {"routing": 1, "random": 1, "lsh": 1},
        {"longformer": 1, "sparse_transformer": 1, "full": 1},
        {"ngram": 3},
    ],
    "encoder": [{"smyrf": 1, "linformer": 1, "lha": 1}, {"yoso": 1, "smart_bird": 1, "lsh": 1}],
    "encoder_decoder": [{"lha": 2, "full": 1}, {"lsh": 2, "local": 1}],
}
PAIRS = {  # of 10 and 14 tokens, among which those with id 7 are left out: not equally many on both ranks
    "source": {"length": 10, "cross_attention": "lsh", "attention": {"pattern": [{"lha": 1, "lsh": 2}], **SMALL}},
    "padding_token": 7,
    "tied_embeddings": True,
}


def config_of(folder: Path, engine: str, kind: str, **sections: dict[str, Any]) -> Config:
    settings = SMALL | {"yoso": SMALL["yoso"] | {"convolution": 3}, "local": {"chunk": 8, "relative": True}}
    model = {
        "kind": kind, "vocabulary": 257, "max_length": 24, "layers": len(PATTERNS[kind]), "d_model": 33, "d_ff": 17,
        "heads": 3, "dropout": 0.1, "positions": {"kind": "learned"},
        "attention": {"pattern": PATTERNS[kind], **settings}, **(PAIRS if kind == "encoder_decoder" else {}),
    }  # fmt: skip
    return tiny_config(folder, engine, model=model, **sections)


def losses(config: Config, ranks: Ranks) -> list[float]:
    found = dummy_steps(config, ranks, STEPS)
    return [value for result in found for value in (result.loss, result.grad_norm)]


def on_two_ranks(folder: str) -> dict[str, list[float]]:
    found = {}
    for kind, stage in CASES:
        zero = {"zero_optimization": {"stage": stage}}
        config = config_of(Path(folder) / f"{kind}{stage}", "deepspeed", kind, deepspeed=zero)
        ranks = start_ranks(config.run)
        found[f"{kind} {stage}"] = losses(config, ranks)
    ranks.stop()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(on_two_ranks, timeout=900, folder=str(tmp_path_factory.mktemp("two")))


def test_every_mechanism_is_there():
    assert {kind for pattern in PATTERNS.values() for split in pattern for kind in split} == set(MECHANISMS)


@pytest.mark.parametrize(("kind", "stage"), CASES)
def test_two_ranks_are_one(found, kind, stage):
    for rank in found:
        assert rank[f"{kind} {stage}"] == pytest.approx(alone(kind), rel=1e-5)


@cache
def alone(kind: str) -> list[float]:
    return losses(config_of(Path("never"), "torch", kind), Ranks())
