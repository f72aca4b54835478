"""Cached decoding by 2 and by 4 ranks that share out the heads: the logits of one rank.

One launch of four gloo ranks, first in two pairs that share out the cases, then as four."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megasparse.attention.cache import KeyValueCache
from megasparse.config.attention import MECHANISMS
from megasparse.config.schema import RunConfig
from megasparse.model.build import build_model
from megasparse.training.ranks import Ranks, start_ranks
from tests.helpers.models import AXIAL, PARTS, attention, named, random_tokens, small, strict_names
from tests.helpers.run_ranks import run_ranks

pytestmark = pytest.mark.slow

SIZES, HEADS, PROMPT, LENGTH = (2, 4), 4, 45, 50
EXTRA: dict[str, dict[str, Any]] = {
    "split": {"attention": attention({"local": 4, "lsh": 4}, {"yoso": 4, "full": 4}), "heads": 8, "head_dim": 8},
    "parts": {"attention": named("lha"), **PARTS, "start_token": 3},
    "fewer heads": {"attention": attention({"lsh": 1, "smart_bird": 1}, {"ngram": 1, "yoso": 1}), "heads": 2},
    "one head": {"attention": attention("lsh", "local"), "heads": 1},
}
NAMES = {2: [*strict_names(), *EXTRA], 4: [*(name for name in strict_names() if name in MECHANISMS), *EXTRA]}
"""Cases by number of ranks; variants of mechanisms run only on two."""


def model_of(name: str) -> Any:
    settings = EXTRA.get(name) or {"attention": named(name)}
    return build_model(small(**{"heads": HEADS, "layers": 2, "positions": AXIAL, **settings}), 3)


def keys_of(cache: Any) -> Iterator[KeyValueCache]:
    if isinstance(cache, KeyValueCache):
        yield cache
    elif dataclasses.is_dataclass(cache):
        for field in dataclasses.fields(cache):
            yield from keys_of(getattr(cache, field.name))


def logits_of(model: Any, ranks: Ranks) -> tuple[Tensor, list[int]]:
    """Logits after a prompt and after each further token, (2, n, V), and the heads of each cache of keys."""
    tokens = random_tokens(2, LENGTH)
    cache = model.new_cache(2, seed=7, sequence=ranks.sequence)
    found = [model.prefill(tokens[:, :PROMPT], cache)]
    found += [model.decode(token, cache) for token in tokens[:, PROMPT:].unbind(1)]
    heads = [keys.k.shape[1] for layer in cache.layers for own in layer.values() for keys in keys_of(own)]
    return torch.stack(found, 1), heads


def compare(name: str, ranks: Ranks) -> dict[str, Any]:
    model = model_of(name)
    found, heads = logits_of(model, ranks)
    expected, of_all = logits_of(model, Ranks()) if ranks.sequence_rank == 0 else (torch.empty_like(found), heads)
    counts = torch.tensor(of_all)
    for x in (expected, counts):
        torch.distributed.broadcast(x, ranks.rank - ranks.sequence_rank, ranks.sequence)
    own = [max(1, all_ // ranks.sequence_size) for all_ in counts.tolist()]
    assert own == heads, "each rank has the keys of its own heads"
    return {"difference": float((found - expected).abs().max())}


def on_four_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size in SIZES:
        ranks = start_ranks(RunConfig(device="cpu"), size)
        own = NAMES[size][ranks.data_rank :: ranks.data_ranks]
        found |= {f"{size} {name}": compare(name, ranks) for name in own}
    torch.distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found():
    return run_ranks(on_four_ranks, 4, timeout=900)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in SIZES for name in NAMES[size]])
def test_ranks_decode_as_one(found, size, name):
    differences = [rank[f"{size} {name}"]["difference"] for rank in found if f"{size} {name}" in rank]
    assert len(differences) == size and all(value < 1e-5 for value in differences)
