"""Two and four ranks that share sequences of fewer heads: losses and gradients of every mechanism are those of one
rank, to 1e-5.

One launch of ranks goes through all cases, as in test_sequence_parallel.
"""

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megasparse.attention import sequence_part
from megasparse.attention.heads import ranks_with_the_same_heads
from megasparse.config.schema import RunConfig
from megasparse.model.build import build_model
from megasparse.ops.bucketed_attention import definition
from megasparse.planning.flops import mechanisms_of
from megasparse.training.ranks import Ranks, start_ranks
from tests.distributed.test_sequence_parallel import ORDINARY, PADDED, batch_of, by_turns, compare, gradients
from tests.helpers.models import AXIAL, VARIANTS, attention, causal_names, encoder_names, named, small
from tests.helpers.run_ranks import run_ranks

pytestmark = pytest.mark.slow

BOTH = [{"local": 2, "lsh": 1}, {"ngram": 1, "lha": 2}]
EXTRA: dict[str, dict[str, Any]] = {
    "split": {"attention": attention(*BOTH), "heads": 3},
    "stored, rotary": {"attention": attention(*BOTH), "heads": 3, **ORDINARY, "positions": {"kind": "rotary"}},
    "head groups": {
        "attention": attention("lsh", {"lha": 2, "yoso": 2}, lsh={"shared_qk": False}).model_copy(
            update={"head_groups": 2}
        ),
        "heads": 4,
        "key_heads": 2,
        "feed_forward_tiles": 3,
    },
    "sketches of two heads": {
        "attention": attention(
            "smart_bird", smart_bird={"sketch": "heads", "sketch_heads": 2, "objective": "attention"}
        ),
        "heads": 4,
    },
}


def cases(world: int) -> list[tuple[str, str, bool]]:
    """(kind, name, padded): on four ranks without the variants of mechanisms."""
    every = by_turns([*causal_names(), *EXTRA], [*encoder_names(), *EXTRA], first=True)
    return [case for case in every if world == 2 or case[1] not in VARIANTS]


def model_of(kind: str, name: str, padded: bool) -> Any:
    """One head, unless the case says otherwise, and dropout, of attention probabilities too where documents are
    padded.
    """
    settings = EXTRA.get(name) or {"attention": named(name, 0.1 if padded else 0.0)}
    if kind == "encoder" and name in EXTRA and "ngram" in str(settings["attention"].pattern):
        settings = settings | {"attention": attention({"local": 2, "lsh": 1}, {"random": 1, "lha": 2})}
    fixed = {"kind": kind, "vocabulary": 260, "heads": 1, "layers": 2, "dropout": 0.1, "positions": AXIAL}
    return build_model(small(**{**fixed, **settings, **(PADDED if padded else {})}), 0)


COUNTED = [("decoder", "split"), ("encoder", "stored, rotary"), ("decoder", "head groups"), ("decoder", "full")]
"""(kind, name) of cases whose bytes are counted."""


def sent(ranks: Ranks, kind: str, name: str) -> list[float]:
    """Bytes of queries, keys, values, outputs and log-sum-exps that this rank sends to others in a forward and a
    backward pass, and those by formula.
    """
    model, tokens, each = model_of(kind, name, False), batch_of(False), []

    def counted(x: Tensor, group: Any, given: list[bool] | None) -> Tensor:
        others = (len(x) if given is None else sum(given)) - 1
        if x.is_floating_point():  # tokens are not
            each.append(others * x[0].numel() * x.element_size())
        return exchanged(x, group, given)

    exchanged = sequence_part._exchanged
    with patch.object(sequence_part, "_exchanged", counted):
        gradients(model, tokens.chunk(ranks.sequence_size, dim=1)[ranks.place], 1.0, sequence=ranks.sequence)
    return [sum(each), all_to_all(model.config, tokens.numel(), ranks.sequence_size, 4)]


def all_to_all(model: Any, tokens: int, ranks: int, size: int) -> float:
    """Bytes that a rank sends in a forward and backward pass of so many tokens: queries, keys and values there, outputs
    back, with their log-sum-exps if ranks with the same heads share out their pairs. size: bytes of a number.
    """
    sent = 0.0
    for mechanism in mechanisms_of(model):
        copies, vector = ranks_with_the_same_heads(mechanism, model, ranks), mechanism.spec.head_dim * size
        ways = ranks // copies
        there = (2 if mechanism.shared_qk else 3) * vector * (ranks - 1)
        parts = mechanism.shares_pairs and copies > 1
        back = (vector + 4) * (ranks - 1) if parts else vector * (ways - 1)
        sent += (there + back) * mechanism.spec.heads / ways
    passes = 2 if model.activations == "stored" and model.attention.head_groups == 1 else 3
    return sent * passes * tokens / ranks


def on_ranks(world: int) -> dict[str, Any]:
    definition.PLACES = 8  # so that each rank has a share of 96 places
    ranks = start_ranks(RunConfig(device="cpu"), world)
    found = {" ".join(map(str, case)): compare(ranks, model_of(*case), batch_of(case[2])) for case in cases(world)}
    found |= {f"sent {kind} {name}": sent(ranks, kind, name) for kind, name in COUNTED}
    torch.distributed.destroy_process_group()
    return found


@cache
def on(world: int) -> dict[str, Any]:
    first, *others = run_ranks(on_ranks, world, timeout=900, world=world)
    for kind, name in COUNTED:
        assert all(rank[f"sent {kind} {name}"] == first[f"sent {kind} {name}"] for rank in others)
    return first


@pytest.mark.parametrize(("world", "case"), [(world, case) for world in (2, 4) for case in cases(world)], ids=str)
def test_ranks_are_one(world, case):
    worst = on(world)[" ".join(map(str, case))]
    assert {name: value for name, value in worst.items() if not value <= 1e-5} == {}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("kind", "name"), COUNTED)
def test_ranks_send_the_bytes_of_the_formula(world, kind, name):
    found, planned = on(world)[f"sent {kind} {name}"]
    assert found == planned > 0
