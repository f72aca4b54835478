"""Encoder–decoders whose sequences are shared by 2 and by 4 ranks: losses and gradients of one rank, to 1e-5.

One launch of four gloo ranks goes through all cases, first in two pairs, which both have the whole batch, then as four:
each rank has a part of source and target, and every mechanism stands in the stacks that it can stand in.
"""

from typing import Any

import pytest
import torch

from megasparse.config.attention import MECHANISMS
from megasparse.config.schema import RunConfig
from megasparse.model.build import build_model
from megasparse.training.ranks import Ranks, start_ranks
from tests.distributed.test_sequence_parallel import compare
from tests.helpers.models import can_be_causal, encoder_names, named, padded_pairs, small_pair
from tests.helpers.run_ranks import run_ranks

pytestmark = pytest.mark.slow

SIZES = (2, 4)
TARGET = 48
ORDINARY = {"blocks": "ordinary", "activations": "stored"}
EXTRA: dict[str, dict[str, Any]] = {
    "stored": ORDINARY,
    "checkpoint": {**ORDINARY, "activations": "checkpoint"},
    "tied, learned": {"tied_embeddings": True, "positions": {"kind": "learned"}},
    "rotary": {"positions": {"kind": "rotary"}},
    "own embedding": {"source": {"shared_embedding": False}},
    "not padded": {},
    "one head": {"heads": 1},
}


def settings_of(name: str, cross: str) -> dict[str, Any]:
    """The mechanism in both stacks, or full attention where it cannot be; in an encoder a sketch learns the answer."""
    if name in EXTRA:
        given = dict(EXTRA[name])
        return given | {"source": {**given.pop("source", {}), "cross_attention": cross}}
    decoder, encoder = (
        named(name if there else "full", 0.1) for there in (can_be_causal(name), name in encoder_names())
    )
    bird = encoder.smart_bird.model_copy(update={"objective": "answer"})
    encoder = encoder.model_copy(update={"smart_bird": bird})
    return {"attention": decoder, "source": {"attention": encoder, "cross_attention": cross}}


def cases(size: int) -> list[tuple[str, str]]:
    """(name, cross-attention) of so many ranks: by turns, so that each name has one kind on 2 ranks, the other on 4."""
    return [(name, ("full", "lsh")[(turn + size // 4) % 2]) for turn, name in enumerate((*EXTRA, *MECHANISMS))]


def compare_pair(ranks: Ranks, name: str, cross: str) -> dict[str, float]:
    fixed = {"layers": 2, "heads": 4, "dropout": 0.1}
    model: Any = build_model(small_pair(**{**fixed, **settings_of(name, cross)}), 0)
    tokens = padded_pairs(3, TARGET)
    return compare(ranks, model, tokens.clamp_max(255) if name == "not padded" else tokens)


def on_four_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size in SIZES:
        ranks = start_ranks(RunConfig(device="cpu"), size)
        found |= {f"{size} {name} {cross}": compare_pair(ranks, name, cross) for name, cross in cases(size)}
    torch.distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found():
    return run_ranks(on_four_ranks, 4, timeout=900)[0]


@pytest.mark.parametrize(("size", "name", "cross"), [(size, *case) for size in SIZES for case in cases(size)])
def test_ranks_that_share_pairs_are_one(found, size, name, cross):
    worst = found[f"{size} {name} {cross}"]
    assert {name: value for name, value in worst.items() if not abs(value) <= 1e-5} == {}
