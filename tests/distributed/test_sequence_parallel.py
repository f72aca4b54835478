"""Two ranks that share every sequence: losses and gradients of every mechanism are those of one rank, to 1e-5.

One launch of two gloo ranks (`on_two_ranks`) goes through all cases: each rank has its half of the tokens, and compares
the mean of the ranks' gradients with the gradient of the whole batch, which it computes by itself.
"""

import math
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor

from megasparse.attention.mechanisms import MECHANISMS
from megasparse.attention.sequence_part import SequencePart
from megasparse.config.schema import RunConfig
from megasparse.model.build import build_model
from megasparse.model.padding import padding_of
from megasparse.training.ranks import Ranks, start_ranks
from tests.helpers.models import AXIAL, all_names, attention, causal_names, kind_of, named, random_tokens, small
from tests.helpers.models import training_draws
from tests.helpers.run_ranks import run_ranks

PAD, SEPARATOR, MASK = 257, 258, 256
LENGTH = 96
SPLIT = [{"local": 2, "lha": 2}, {"lsh": 2, "full": 2}]
PADDED = {"padding_token": PAD, "document_separator": SEPARATOR}
ORDINARY = {"blocks": "ordinary", "activations": "stored"}

EXTRA: dict[str, dict[str, Any]] = {
    "split": {"attention": attention(*SPLIT)},
    "rotary": {"attention": attention(*SPLIT), "positions": {"kind": "rotary"}},
    "learned": {"attention": attention(*SPLIT), "positions": {"kind": "learned", "offset": 2}},
    "sinusoidal": {"attention": attention(*SPLIT, lha={"sinusoidal_positions": True})},
    "stored": {"attention": attention(*SPLIT), **ORDINARY},
    "checkpoint": {"attention": attention(*SPLIT), **ORDINARY, "activations": "checkpoint"},
    "score_from": {"attention": attention("lsh"), "score_from": 70},
    "whole words": {"attention": attention("lsh"), "masking": {"whole_words": True}},
    "bert": {"attention": named("yoso expectation"), "style": "bert", **ORDINARY, "token_types": 2},
}
DECODERS, ENCODERS = set(EXTRA) - {"whole words", "bert"}, set(EXTRA) - {"score_from"}


def model_of(kind: str, name: str, padded: bool) -> Any:
    """4 heads, dropout, and of every weight a gradient: of 96 tokens, the longest 128."""
    settings = EXTRA.get(name) or {"attention": named(name)}
    fixed = {"kind": kind, "vocabulary": 260, "heads": 4, "layers": 2, "dropout": 0.1, "positions": AXIAL}
    config = small(**{**fixed, **settings, **(PADDED if padded else {})})
    model = build_model(config, 0)
    if config.masking.whole_words:
        model.set_word_starts(torch.arange(256) % 3 == 0)
    return model


def batch_of(padded: bool) -> Tensor:
    tokens = random_tokens(2, LENGTH)
    if padded:  # the second sequence ends in the first half, and begins with padding
        tokens[0, [20, 47, 70]] = SEPARATOR
        tokens[1, 40:] = tokens[1, :3] = PAD
        tokens[1, 25] = SEPARATOR
    return tokens


def cases() -> list[tuple[str, str, bool]]:
    decoders = [("decoder", name, padded) for name in [*causal_names(), *DECODERS] for padded in (False, True)]
    encoders = [("encoder", name, padded) for name in [*all_names(), *ENCODERS] for padded in (False, True)]
    return sorted(decoders + encoders)


def gradients(model: Any, tokens: Tensor, divisor: float, **shared: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    model.zero_grad()
    objective, statistics = model(tokens, training_draws(len(tokens)), divisor=divisor, **shared)
    objective.backward()
    return objective.detach(), {name: p.grad for name, p in model.named_parameters()}, statistics


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest, relative to the largest number expected."""
    assert found.isfinite().all() and expected.isfinite().all()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def compare(ranks: Ranks, kind: str, name: str, padded: bool) -> dict[str, float]:
    model, tokens = model_of(kind, name, padded), batch_of(padded)
    scored = float(model.count_scored(tokens))
    alone, expected, told = gradients(model, tokens, scored)
    own = tokens.chunk(ranks.sequence_size, dim=1)[ranks.place]
    divided = scored / ranks.world_size  # as the engine has it: scored tokens a rank
    counted = ranks.sum(model.count_scored(own, sequence=ranks.sequence).double())
    objective, found, statistics = gradients(model, own, divided, sequence=ranks.sequence)
    worst = {"objective": difference(ranks.sum(objective) / ranks.world_size, alone), "counted": counted - scored}
    for name in ("nats", "tokens"):
        worst[name] = difference(ranks.sum(statistics[name].double()), told[name].double())
    worst["accuracy"] = float((statistics["accuracy"] - told["accuracy"]).abs())
    missing = [name for name, gradient in found.items() if gradient is None]
    assert not missing, f"ZeRO waits for the gradients of {missing}"
    for name, gradient in found.items():
        if expected[name].abs().max() > 0:
            worst[name] = difference(ranks.sum(gradient) / ranks.world_size, expected[name])
    return {name: float(value) for name, value in worst.items()}


def on_two_ranks() -> dict[str, dict[str, float]]:
    ranks = start_ranks(RunConfig(device="cpu"), 2)
    found = {" ".join(map(str, case)): compare(ranks, *case) for case in cases()}
    ranks.stop()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    return run_ranks(on_two_ranks, timeout=240)[0]


def test_every_mechanism_is_there() -> None:
    assert {kind_of(name) for kind, name, _ in cases() if name not in EXTRA} == set(MECHANISMS)


@pytest.mark.parametrize("case", cases(), ids=lambda case: " ".join(map(str, case)))
def test_two_ranks_are_one(found: dict[str, dict[str, float]], case: tuple[str, str, bool]) -> None:
    worst = found[" ".join(map(str, case))]
    assert {name: value for name, value in worst.items() if not value <= 1e-5} == {}
