"""Strict causality: replacing later tokens changes no bit of an earlier output, of any mechanism that does not say it
leaks, with trained weights; nor does the length of the sequence, where keys are in buckets or in a window by position.
"""

import copy
import itertools
from functools import cache

import pytest
import torch

from megasparse.attention.heads import build_mechanism
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from tests.helpers.models import (
    attention,
    by_path_and_numbers,
    causal_names,
    kind_of,
    named,
    random_tokens,
    small,
    strict_names,
    training_draws,
)

PATTERNS = {name: named(name, dropout=0.1) for name in strict_names()} | {
    "pattern": attention("local", "local", "lsh", "local"),
    "split heads": attention({"local": 1, "lsh": 1}),
}
LEAKING = [name for name in causal_names() if name not in strict_names()]
SHARED = ["lsh", "lha", "routing", "random", "ngram", "local"]
IDS = {"document_separator": 10, "padding_token": 11}
BY_DOCUMENT = [
    name
    for name in strict_names()
    if build_mechanism(kind_of(name), small(attention=named(name)), 2).computed_by_document
]


@cache
def trained(name, length=120, **ids):
    """A model after some steps of Adam on a text of few symbols."""
    changes = ids | ({"max_length": length, "positions": {"kind": "rotary"}} if length > 128 else {})
    model = build_model(small(attention=PATTERNS.get(name) or named(name), dropout=0.1, **changes), seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        model(random_tokens(2, 120, vocabulary=16, seed=step), training_draws(2, step))[0].backward()
        optimizer.step()
    return model.requires_grad_(False)


def moved_prefix(model, positions, rng, length=120, seeds=1):
    """The largest change of any nats before each position, by (position, seed) of the tokens that replace the rest."""
    tokens, ids = random_tokens(2, length), [*IDS.values()] * (model.config.padding_token is not None)
    tokens[:, 5 : 5 + len(ids)] = torch.tensor(ids)
    nats = model.token_scores(tokens, rng).nats
    changes = {}
    for first, seed in itertools.product(positions, range(seeds)):
        other = tokens.clone()
        replacement = random_tokens(2, length - first, 255, seed)
        other[:, first:] = (other[:, first:] + 1 + replacement) % 256
        for number, token in enumerate(ids):
            other[:, first:][replacement % 8 == number] = token
        changes[first, seed] = (model.token_scores(other, rng).nats - nats)[:, :first].abs().max().item()
    return changes


@by_path_and_numbers(PATTERNS)
def test_no_later_token_moves_an_earlier_output(name, dtype, threads):
    """Nor do later separators and padding, but for mechanisms with products as large as a document."""
    ids = {} if dtype == torch.float32 or name in BY_DOCUMENT else IDS
    model = copy.deepcopy(trained(name, **ids)).to(dtype)
    assert model.leaks == []
    for rng in (RngContext.evaluation(0, 2), training_draws(2, step=5)):  # rounds and dropout of a step
        assert not any(moved_prefix(model, (9, 60, 119), rng).values())


@pytest.mark.parametrize(
    "length,dtype",
    [
        (1024, torch.float32),
        pytest.param(4096, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(16384, torch.float16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["lsh", "lha", "routing", "ngram", "split heads"])
def test_no_later_token_moves_a_bit_of_hashed_attention(name, dtype, length):
    model = copy.deepcopy(trained(name, length)).to(dtype)
    positions = (length // 3 + 5, length - 77)
    assert not any(moved_prefix(model, positions, RngContext.evaluation(0, 2), length).values())


@by_path_and_numbers([n for n in strict_names() if kind_of(n) in SHARED and n != "local relative"])
def test_a_prefix_has_the_same_bits_in_a_sequence_of_any_length(name, dtype, threads):
    model, tokens, rng = copy.deepcopy(trained(name)).to(dtype), random_tokens(2, 120), RngContext.evaluation(0, 2)
    nats = model.token_scores(tokens, rng).nats
    for length in (5, 33, 96, 119):
        assert torch.equal(model.token_scores(tokens[:, :length], rng).nats, nats[:, :length]), length


@pytest.mark.parametrize("name", LEAKING)
def test_a_leaking_window_is_marked_and_leaks(name):
    model = trained(name)
    assert len(model.leaks) == 3 and "window = band" in model.leaks[0]
    assert max(moved_prefix(model, (60,), RngContext.evaluation(0, 2), seeds=5).values()) > 1e-2
