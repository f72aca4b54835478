"""Encoder–decoders whose sequences are shared by 2 and by 4 ranks: losses and gradients of one rank, to 1e-5.

One launch of four gloo ranks goes through all cases, first in two pairs, which both have the whole batch, then as four:
each rank has a part of source and target, and every mechanism stands in the stacks that it can stand in.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megasparse.config.attention import MECHANISMS
from megasparse.config.schema import RunConfig
from megasparse.model.build import build_model
from megasparse.model.stack import cut
from megasparse.ops.random import RngContext
from megasparse.training.ranks import Ranks, start_ranks
from tests.distributed.test_sequence_parallel import difference, gradients, summed
from tests.helpers.models import can_be_causal, encoder_names, named, padded_pairs, small_pair
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import dummy_steps, tiny_config

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


def held_out(model: Any, tokens: Tensor, ranks: Ranks) -> Tensor:
    """The nats of a window as evaluation inside training sums them, of what is on this rank."""
    own, padding = cut(tokens, model.config, ranks.sequence)
    with torch.no_grad():
        return model(own, RngContext.evaluation(0, len(tokens)), padding)[1]["nats"].double()


def compare(ranks: Ranks, name: str, cross: str) -> dict[str, float]:
    """On rank 0, the largest relative difference of each sum over the ranks to that of the whole batch."""
    fixed = {"layers": 2, "heads": 4, "dropout": 0.1}
    model: Any = build_model(small_pair(**{**fixed, **settings_of(name, cross)}), 0)
    tokens = padded_pairs(3, TARGET)
    if name == "not padded":
        tokens = tokens.clamp_max(255)
    scored = float(model.count_scored(tokens))
    own = tokens.chunk(ranks.sequence_size, dim=1)[ranks.place]
    counted = float(ranks.sum(model.count_scored(own, sequence=ranks.sequence).double())) / ranks.data_ranks
    objective, found, statistics = gradients(model, own, scored / ranks.sequence_size, sequence=ranks.sequence)
    missing = [name for name, gradient in found.items() if gradient is None]
    assert not missing, f"ZeRO waits for the gradients of {missing}"
    own_sums = {"nats": statistics["nats"], "tokens": statistics["tokens"], "held out": held_out(model, tokens, ranks)}
    means = {"objective": objective, **found}
    sums = dict(zip(own_sums, summed(ranks, own_sums, ranks.data_ranks), strict=True))
    sums |= dict(zip(means, summed(ranks, means, ranks.world_size), strict=True))
    if ranks.rank:
        return {}
    alone, expected, reported = gradients(model, tokens, scored)
    exact = {"objective": alone, "nats": reported["nats"], "tokens": reported["tokens"], **expected}
    exact["held out"] = held_out(model, tokens, Ranks())
    worst = {name: difference(sums[name], x) for name, x in exact.items() if x.abs().max() > 0}
    return worst | {"counted": counted - scored, "accuracy": float(statistics["accuracy"] - reported["accuracy"])}


def trained(folder: str, engine: str, ranks: Ranks, **sections: dict[str, Any]) -> list[float]:
    """Losses of three steps of sequences of 24 tokens, of which some are padding (id 7)."""
    attention = {"pattern": ["lsh"], "lsh": {"chunk": 4}}
    source = {"length": 8, "layers": 1, "attention": attention, "cross_attention": "lsh"}
    model = {
        "kind": "encoder_decoder", "max_length": 16, "layers": 2, "d_model": 16, "d_ff": 17, "heads": 4,
        "dropout": 0.1, "padding_token": 7, "attention": attention, "source": source,
    }  # fmt: skip
    config = tiny_config(Path(folder), engine, model=model, data={"sequence_length": 24}, **sections)
    found = dummy_steps(config, ranks, 3)
    return [v for r in found for v in (r.loss, r.grad_norm, r.statistics["accuracy"], float(r.tokens))]


def on_four_ranks(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size in SIZES:
        ranks = start_ranks(RunConfig(device="cpu"), size)
        found |= {f"{size} {name} {cross}": compare(ranks, name, cross) for name, cross in cases(size)}
    shared = {"parallel": {"sequence": 4}, "deepspeed": {"zero_optimization": {"stage": 3}}}
    found["trained"] = trained(folder, "deepspeed", ranks, **shared)
    torch.distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(on_four_ranks, 4, timeout=900, folder=str(tmp_path_factory.mktemp("four")))[0]


def test_a_training_on_four_ranks_is_that_on_one(found):
    assert found["trained"] == pytest.approx(trained("never", "torch", Ranks()), rel=1e-5)


@pytest.mark.parametrize(("size", "name", "cross"), [(size, *case) for size in SIZES for case in cases(size)])
def test_ranks_that_share_pairs_are_one(found, size, name, cross):
    worst = found[f"{size} {name} {cross}"]
    assert {name: value for name, value in worst.items() if not abs(value) <= 1e-5} == {}
