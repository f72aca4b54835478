"""Two and four ranks that share sequences of fewer heads: losses and gradients of every mechanism are those of one
rank, to 1e-5.

One launch of ranks goes through all cases, as in test_sequence_parallel.
"""

from functools import cache
from typing import Any

import pytest
import torch

from megasparse.config.schema import RunConfig
from megasparse.model.build import build_model
from megasparse.ops.bucketed_attention import definition
from megasparse.training.ranks import start_ranks
from tests.distributed.test_sequence_parallel import ORDINARY, PADDED, batch_of, by_turns, compare
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


def on_ranks(world: int) -> dict[str, Any]:
    definition.PLACES = 8  # so that each rank has a share of 96 places
    ranks = start_ranks(RunConfig(device="cpu"), world)
    found = {" ".join(map(str, case)): compare(ranks, model_of(*case), batch_of(case[2])) for case in cases(world)}
    torch.distributed.destroy_process_group()
    return found


@cache
def on(world: int) -> dict[str, Any]:
    return run_ranks(on_ranks, world, timeout=900, world=world)[0]


@pytest.mark.parametrize(("world", "case"), [(world, case) for world in (2, 4) for case in cases(world)], ids=str)
def test_ranks_are_one(world, case):
    worst = on(world)[" ".join(map(str, case))]
    assert {name: value for name, value in worst.items() if not value <= 1e-5} == {}
