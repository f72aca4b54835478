"""Strict causality: replacing later tokens moves no earlier output, of any mechanism that does not say it leaks."""

import pytest

from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from tests.helpers.models import attention, causal_names, named, random_tokens, small, strict_names

PATTERNS = {name: named(name) for name in strict_names()} | {
    "pattern": attention("local", "local", "lsh", "local"),
    "split heads": attention({"local": 1, "lsh": 1}),
}
LEAKING = [name for name in causal_names() if name not in strict_names()]


def moved_prefix(config, first_changed, seeds=5):
    """The largest change of any nats before `first_changed` (rounding is about 1e-6), over several replacements."""
    model = build_model(small(attention=config), seed=0)
    tokens = random_tokens(2, 120)
    rng = RngContext.evaluation(0, 2)
    nats = model.token_scores(tokens, rng).nats
    changes = []
    for seed in range(seeds):
        other = tokens.clone()
        other[:, first_changed:] = (
            other[:, first_changed:] + 1 + random_tokens(2, 120 - first_changed, 255, seed)
        ) % 256
        changes.append((model.token_scores(other, rng).nats - nats)[:, :first_changed].abs().max().item())
    return max(changes)


@pytest.mark.parametrize("name", PATTERNS)
def test_no_later_token_moves_an_earlier_output(name):
    assert build_model(small(attention=PATTERNS[name]), seed=0).leaks == []
    assert moved_prefix(PATTERNS[name], 60) < 1e-5
    assert moved_prefix(PATTERNS[name], 119) < 1e-5


@pytest.mark.parametrize("name", LEAKING)
def test_a_leaking_window_says_so_and_does(name):
    leaks = build_model(small(attention=named(name)), seed=0).leaks
    assert len(leaks) == 3 and "window = band" in leaks[0]
    assert moved_prefix(named(name), 60) > 1e-2
